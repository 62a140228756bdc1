"""Counting a step's launches and the bytes that they move, without a GPU: launches are recorded instead of run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..decoder.model import Model
from ..decoder.parts.batch import Batch, Run
from ..kernels.base.launch import Launch, noted
from ..kernels.base.workspace import set_apart

# A launch reads only a part of caches, tables and workspaces; the cache's part is counted by positions.
_NOT_WHOLE = frozenset(
    [
        "keys",
        "values",
        "key_scales",
        "value_scales",
        "tables",
        "cosines",
        "sines",
        "sums",
        "parts",
        "arrived",
        "scratch",
        "history",
        "hadamard",
    ]
)
# Views and allocations; a workspace grows once.
_FREE = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "alias",
        "detach",
        "unbind",
        "as_strided",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "unflatten",
        "chunk",
        "lift_fresh",
        "item",
        "_local_scalar_dense",
        "numpy_T",
        "zeros",
    ]
)


@dataclass
class StepCounts:
    """A step's launches and bytes.

    Attributes:
        launches: of kernels, ours and torch's.
        moved: bytes that they read and write, with each tensor once per launch.
        kinds: how often each was launched.
    """

    launches: int = 0
    moved: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, moved: int) -> None:
        """One more launch."""
        self.launches += 1
        self.moved += moved
        self.kinds[name] += 1


def count(
    work: Callable[[], object], cache_bytes: Callable[[Launch], int] = lambda _: 0, *, computes: bool = False
) -> StepCounts:
    """Count the launches of ``work`` on CPU tensors that are not computed: reading a value on the host would fail.

    Args:
        work: a step, or a part of one.
        cache_bytes: bytes that a launch reads of the cache.
        computes: let torch's operators compute, for work that reads values.
    """
    found, launches = StepCounts(), list[Launch]()
    mode = nullcontext() if computes else FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(), set_apart(), noted(launches.append), mode, _TorchCalls(found):
        work()
    for one in launches:
        parts = {
            id(value): value.nbytes
            for name, value in one.arguments.items()
            if isinstance(value, Tensor) and name not in _NOT_WHOLE
        }
        found.add(getattr(one.function, "__name__", "kernel").strip("_"), sum(parts.values()) + cache_bytes(one))
    return found


def count_decode(model: Model, sequences: int, context: int) -> StepCounts:
    """A decode step of the layers, with one token per sequence after a context."""
    runs, block = _runs([1] * sequences, context)
    return _count_layers(model, runs, block)


def count_prompt(model: Model, tokens: int) -> StepCounts:
    """A prefill step of the layers, for a whole prompt."""
    runs, block = _runs([tokens], tokens)
    return _count_layers(model, runs, block)


def _runs(counts: list[int], context: int) -> tuple[list[Run], int]:
    block = 16
    each = -(-context // block)
    found = []
    for i, tokens in enumerate(counts):
        blocks = list(range(i * each, (i + 1) * each))
        found.append(Run([0] * tokens, context - tokens, blocks, context, 0))
    return found, block


def _count_layers(model: Model, runs: list[Run], block: int) -> StepCounts:
    assert model.stack is not None
    store = model.keys_values(sum(len(run.blocks) for run in runs), block, model.dtype)
    batch = Batch(runs, block)
    hidden = torch.zeros(len(batch.tokens), model.spec.hidden, dtype=model.dtype)
    rotations = model.rotations.of(batch.positions, batch.lengths)
    stack: Any = model.stack
    step = stack.laid_out(rotations, store, batch)
    layers = len(model.spec.cached_heads)
    of_cache = sum(part.nbytes for index in range(layers) for part in store.layer(index).parts()) // layers

    def cache_bytes(one: Launch) -> int:
        return of_cache if getattr(one.function, "__name__", "").strip("_").startswith("attend") else 0

    return count(lambda: stack.run(hidden, step, store), cache_bytes, computes=not stack.captures)


class _TorchCalls(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self, found: StepCounts) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE:
            tensors = [*_tensors((args, kwargs or {})), *_tensors(given)]
            self._found.add(f"torch {name}", sum({id(each): each.nbytes for each in tensors}.values()))
        return given


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in _tensors(part)]
    return [each for part in value.values() for each in _tensors(part)] if isinstance(value, dict) else []
