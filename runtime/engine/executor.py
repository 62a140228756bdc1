"""What carries out a step's plan, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..decoder.batch import Batch
from ..decoder.kv_cache import KeysValues
from ..decoder.logit_statistics import LogitStatistics
from .sampling import Sampled
from .scheduler import StepPlan
from .sequence import BeamCandidate, Request, Sequence, TokenLogprobs, TokenScore


@dataclass
class StepResult:
    """What a step found.

    Attributes:
        tokens: the next token of each sequence that was computed to its end (all samples of a prompt at once).
        continuations: in beam search, each beam's candidates instead.
        prompt_logprobs: for each sequence, of the prompt tokens that follow those computed.
        scores: of each sequence's expected tokens that were reached (of all a prompt's continuations at once).
        broken: sequences whose logits are not numbers.
    """

    tokens: dict[Sequence, Sampled] = field(default_factory=dict)
    continuations: dict[Sequence, list[BeamCandidate]] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    scores: dict[Sequence, list[TokenScore]] = field(default_factory=dict)
    broken: list[Sequence] = field(default_factory=list)


class RunsBatches(Protocol):
    """What the executor needs of a model."""

    @property
    def logit_statistics(self) -> Callable[[Tensor], LogitStatistics]: ...

    def __call__(self, batch: Batch, store: KeysValues) -> Tensor: ...


class StepHandle(Protocol):
    """A step that was started.

    Attributes:
        completed: whether it is done already, so that nothing is won by starting the next one before asking for its result.
    """

    @property
    def completed(self) -> bool: ...

    def collect(self) -> StepResult:
        """What it found; waits for it."""
        ...


@dataclass(frozen=True)
class CompletedStep:
    """A step that was carried out at once."""

    found: StepResult
    completed: bool = True

    def collect(self) -> StepResult:
        """What it found."""
        return self.found


class Executor(Protocol):
    """Carries out plans: with a model, or with a clock in the simulator.

    Attributes:
        model: what computes; a profile puts a clock around it.
    """

    model: RunsBatches

    def execute(self, plan: StepPlan) -> StepHandle:
        """Start a step, or carry it out."""
        ...

    def runs_ahead(self, request: Request) -> bool:
        """Whether steps with this request may be started before the ones before them have given their tokens."""
        ...
