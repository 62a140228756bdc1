"""A decoder's layers through torch.compile, for any device.

Attention with its cache is one opaque operator, and so is a mixture of experts, whose shapes depend on routing; everything
else is plain torch, so that the compiler's fusions can be compared with Smelt's kernels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..heads import Heads
from ..weights.matrix import Matrix
from .linears.linear import DenseLinear, Linear
from .parts.batch import Batch
from .parts.kv_cache import KeysValues
from .parts.operators import Attention, FeedForward, Operators, Rotation, RunLayers

# The current step; operators that compiled code calls take only tensors and numbers.
_STEPS: list[tuple[KeysValues, Batch]] = []
# What they stand for, as long as its model does.
_NUMBERS = itertools.count()
_KNOWN: WeakValueDictionary[int, Attention] = WeakValueDictionary()
_MIXTURES: WeakValueDictionary[int, FeedForward] = WeakValueDictionary()


@torch.library.custom_op("smelt::attend", mutates_args=())
def _attend(
    projected: Tensor, cosine: Tensor | None, sine: Tensor | None, known: int, layer: int, width: int
) -> Tensor:
    store, batch = _STEPS[-1]
    rotation = None if cosine is None or sine is None else (cosine, sine)
    return _KNOWN[known](projected, rotation, store, layer, batch)


@_attend.register_fake
def _(projected: Tensor, cosine: Tensor | None, sine: Tensor | None, known: int, layer: int, width: int) -> Tensor:
    return projected.new_empty(projected.shape[0], width)


@torch.library.custom_op("smelt::mixture", mutates_args=())
def _mixture(hidden: Tensor, known: int) -> Tensor:
    return _MIXTURES[known](hidden)


@_mixture.register_fake
def _(hidden: Tensor, known: int) -> Tensor:
    return torch.empty_like(hidden)


@dataclass
class Lowered:
    """What the compiler has lowered so far.

    Attributes:
        graphs: compiled graphs: separate ones for steps of one token and of several, and for each part between graph breaks.
        before: operators before compilation, without views.
        after: kernels that it generated, and operators that it calls unchanged.
        called: the latter, by name.
    """

    graphs: int = 0
    before: int = 0
    after: int = 0
    called: Counter[str] = field(default_factory=Counter)

    def sentence(self) -> str:
        """A summary for messages."""
        if not self.graphs:
            return "torch.compile has lowered nothing yet"
        as_they_are = ", ".join(f"{count} {name}" for name, count in self.called.most_common())
        return (
            f"torch.compile lowered {self.before} operators in {self.graphs} graphs to {self.after} calls:"
            f" {self.after - self.called.total()} kernels of its own, {as_they_are}"
        )


class CompiledOperators(Operators):
    """Like :class:`Operators`, with all layers lowered together.

    Args:
        dtype: what is computed in.
        device: where.

    Attributes:
        lowered: the result so far.
    """

    takes_adapters = False

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(dtype, device)
        self.lowered = Lowered()

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        return DenseLinear(matrix, bias, self.dtype, self.device)

    def attention(self, heads: Heads) -> Attention:
        return _Opaque(super().attention(heads), heads)

    def explain_layers(self) -> str | None:
        return self.lowered.sentence()

    def mixture(self, forward: FeedForward) -> FeedForward:
        return _OpaqueMixture(forward)

    def lower(self, run: RunLayers) -> RunLayers:
        def layers(hidden: Tensor, rotations: dict[str, Rotation]) -> Tensor:
            # Only attention needs the cache and the batch, and it finds them itself.
            return run(hidden, rotations, None, None)  # pyright: ignore[reportArgumentType]

        # The compiler gives up on code that it has compiled eight times, and all models share the layers' code.
        own = FunctionType(layers.__code__.replace(), layers.__globals__, "layers", None, layers.__closure__)
        compiled = torch.compile(own, dynamic=True, backend=_counting(self.lowered))

        def whole(hidden: Tensor, rotations: dict[str, Rotation], store: KeysValues, batch: Batch) -> Tensor:
            _STEPS.append((store, batch))
            try:
                return compiled(hidden, rotations)
            finally:
                _STEPS.pop()

        return whole


class _Opaque:
    """Attention that compiled code calls by a number."""

    def __init__(self, attention: Attention, heads: Heads) -> None:
        self._number, self._attention = next(_NUMBERS), attention
        _KNOWN[self._number] = attention
        self._width = heads.queries * heads.size

    def __call__(
        self, projected: Tensor, rotation: Rotation | None, store: KeysValues, layer: int, batch: Batch
    ) -> Tensor:
        cosine, sine = rotation or (None, None)
        return torch.ops.smelt.attend(projected, cosine, sine, self._number, layer, self._width)


class _OpaqueMixture:
    """A mixture of experts that compiled code calls by a number."""

    def __init__(self, forward: FeedForward) -> None:
        self._number, self._forward = next(_NUMBERS), forward
        self.linears = forward.linears
        _MIXTURES[self._number] = forward

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.ops.smelt.mixture(hidden, self._number)


def _counting(lowered: Lowered) -> Callable[..., Any]:
    """Inductor, counting operators before and after."""
    from torch._functorch import config as functorch
    from torch._inductor import metrics
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        given = [node for node in graph.graph.nodes if node.op == "call_function" and not _is_view(node.target)]
        begun = metrics.generated_kernel_count
        made = compile_fx_inner(graph, inputs, **options)
        called = Counter(_name(node.target) for node in given if _name(node.target) in _CALLED)
        lowered.graphs += 1
        lowered.before += len(given)
        lowered.after += metrics.generated_kernel_count - begun + called.total()
        lowered.called += called
        return made

    def backend(graph: Any, inputs: Any) -> Any:
        # Entries of this cache are not compiled again and so not counted; Inductor's own cache keeps the kernels and their count.
        with functorch.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=inner)

    return backend


# Operators that Inductor calls instead of writing loops for them.
_CALLED = {"mm", "addmm", "bmm", "baddbmm", "linear", "attend", "mixture", "_int_mm", "topk", "sort", "index_add"}
_VIEWS = {"view", "reshape", "t", "transpose", "permute", "expand", "slice", "select", "split", "split_with_sizes"} | {
    "unsqueeze", "squeeze", "alias", "detach", "unbind", "as_strided", "getitem", "sym_size", "sym_numel"
}  # fmt: skip


def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))


def _is_view(target: Any) -> bool:
    name = _name(target)
    return name in _VIEWS or (name in ("add", "mul", "floordiv") and not hasattr(target, "overloadpacket"))
