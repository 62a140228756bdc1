"""A decode step's launches in order, from the engine's own code, and what each is predicted to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from smelt.runtime.cache_types import BY_NAME
from smelt.runtime.gpu.step_kinds import StepKind
from smelt.runtime.kernels.base.launch import Launch, noted
from smelt.runtime.kernels.base.precompile import identity
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.base.workspace import set_apart
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..gpu.meta_model import Changes, executor_on_meta, meta_stands_for
from ..gpu.random_checkpoints import CheckpointSize
from .device import H100, GpuFigures
from .machine_code import CodeCosts, costs_of
from .timing_model import Ideas, Terms, mean, terms_of, with_norm
from .work import Lengths, Work, name_of, of_torch, work_of

TARGET = TARGETS["sm_90"]
CACHES = {("plain" if name == "auto" else name): each.torch_dtype(torch.bfloat16) for name, each in BY_NAME.items()}
_GATHERS = ("index", "index_select", "embedding")  # which read no more than they give
_MEMORY = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "zeros",
)  # workspaces, which a captured step has already
_NORM_ROWS = 8


@dataclass(frozen=True)
class Asked:
    """A step.

    Attributes:
        size: of the model.
        stored: what its weights are stored as.
        sequences: that each add one token.
        context: positions that each has, this one included.
        cache: what keys and values are kept as, one of :data:`CACHES`.
    """

    size: CheckpointSize
    stored: str
    sequences: int
    context: int
    cache: str = "plain"


@dataclass(frozen=True)
class DecodeStep:
    """A step's launches.

    Attributes:
        launches: in order: ours, or the name of one of torch's operators and the bytes that it moves.
        lengths: what their tensors do not say.
        resident: bytes of weights, keys and values.
    """

    launches: list[Launch | tuple[str, int]]
    lengths: Lengths
    resident: int


@dataclass(frozen=True)
class LaunchGroup:
    """Launches that are alike.

    Attributes:
        label: for people.
        kernel: its name.
        count: how many.
        programs: of one.
        memory: bytes from memory, of one.
        seconds: of one, on average.
        terms: of one, on average.
        costs: of its code; None for torch's operators.
    """

    label: str
    kernel: str
    count: int
    programs: int
    memory: int
    seconds: float
    terms: Terms
    costs: CodeCosts | None


@dataclass(frozen=True)
class Prediction:
    """A step's.

    Attributes:
        asked: the step.
        rows: by kinds of launches, in the order of the first of each.
        seconds: from one step to the next.
        resident: bytes of weights, keys and values.
    """

    asked: Asked
    rows: list[LaunchGroup]
    seconds: float
    resident: int

    @property
    def launches(self) -> int:
        """How many."""
        return sum(row.count for row in self.rows)

    @property
    def memory(self) -> int:
        """Bytes that come from memory."""
        return sum(row.count * row.memory for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences."""
        return self.asked.sequences / self.seconds


def step_of(asked: Asked, changes: Changes | None = None) -> DecodeStep:
    """What the engine launches for a step; nothing is computed, and no weight has memory."""
    sequences, context = asked.sequences, asked.context
    recorder = _Recorder()
    with meta_stands_for(TARGET), set_apart(), torch.inference_mode():
        executor = executor_on_meta(
            asked.size,
            asked.stored,
            TARGET,
            CACHES[asked.cache],
            max_num_seqs=sequences,
            max_num_batched_tokens=sequences,
            max_model_len=context,
            changes=changes,
        )
        with noted(recorder.launches.append), recorder:
            executor._steps.body(StepKind(sequences, sequences, False, True))
    store: Any = executor._store
    model: Any = executor.model
    cache = sum(part.nbytes for i in range(asked.size.layers) for part in store.layer(i).parts())
    return DecodeStep(recorder.launches, Lengths(sequences, context), model.nbytes() + cache)


class _Recorder(TorchDispatchMode):
    """Notes torch's operators, too."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs, outputs = _tensors(args), _tensors(given)
        storages = {each.untyped_storage()._cdata for each in inputs}
        is_view = not name.endswith("_") and any(each.untyped_storage()._cdata in storages for each in outputs)
        if outputs and not is_view and name not in _MEMORY:
            written = sum(each.nbytes for each in outputs)
            read = written if name in _GATHERS else sum(each.nbytes for each in inputs)
            self.launches.append((f"torch {name}", read + written))
        return given


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, (list, tuple)) else []


@dataclass
class Predictor:
    """Predicts steps; each compilation is made once for all of them.

    Attributes:
        device: where.
        ideas: what is assumed besides.
        known: what compiled launches cost.
    """

    device: GpuFigures = H100
    ideas: Ideas = field(default_factory=Ideas)
    known: dict[Any, CodeCosts] = field(default_factory=dict)

    def _costs(self, launch: Launch | None) -> CodeCosts | None:
        """Of a launch's code; None for torch's operators."""
        if launch is None:
            return None
        kind = identity(launch)
        if kind not in self.known:
            self.known[kind] = costs_of(launch, TARGET, self.device)
        return self.known[kind]

    def predict(self, asked: Asked, changes: Changes | None = None) -> Prediction:
        """A step's time, launch by launch."""
        step = step_of(asked, changes)
        alike: dict[Any, tuple[Work, Launch | None, list[Terms]]] = {}
        idle = 0.0
        for launch, work in self._works(step):
            terms = terms_of(work, self._costs(launch), self.device, self.ideas, idle)
            # A norm, say, leaves memory alone from its beginning to its end.
            idle = terms.tail if work.memory else terms.total - terms.gap
            kind = (work, None if launch is None else identity(launch))
            alike.setdefault(kind, (work, launch, []))[2].append(terms)
        rows = [self._row(*one) for one in alike.values()]
        seconds = sum(row.count * row.seconds for row in rows) + self.device.between_steps
        return Prediction(asked, rows, seconds, step.resident)

    def _row(self, work: Work, launch: Launch | None, terms: list[Terms]) -> LaunchGroup:
        name = work.label if launch is None else name_of(launch)
        seconds = sum(one.total for one in terms) / len(terms)
        return LaunchGroup(
            work.label, name, len(terms), work.programs, work.memory, seconds, mean(terms), self._costs(launch)
        )

    def _works(self, step: DecodeStep) -> Sequence[tuple[Launch | None, Work]]:
        found: list[tuple[Launch | None, Work]] = []
        norm: Launch | None = None
        for one in step.launches:
            if isinstance(one, tuple):
                found.append((None, of_torch(*one)))
                continue
            if self._goes_inside(one):
                norm = one
                continue
            work = work_of(one, step.lengths)
            if norm is not None:
                rows, columns = _shape(norm)
                work, norm = with_norm(work, columns, rows, one.warps), None
            found.append((one, work))
        return found

    def _goes_inside(self, launch: Launch) -> bool:
        """Whether it is a norm that the linear after it would compute."""
        given = launch.arguments
        alone = name_of(launch) == "normalize_rows" and given["scales"] is None and given["sums"] is None
        return self.ideas.norm_inside and alone and _shape(launch)[0] <= _NORM_ROWS


def _shape(norm: Launch) -> tuple[int, int]:
    x = norm.arguments["x"]
    assert isinstance(x, Tensor)
    return x.shape[0], x.shape[1]
