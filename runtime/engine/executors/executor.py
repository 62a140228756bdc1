"""The executor interface: it runs a step's plan and returns the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ...blocks.block_cache import Copy
from ...decoder.parts.batch import Batch
from ...decoder.parts.kv_cache import KeysValues
from ...requests.sequence import BeamCandidate, Request, Sequence, TokenLogprobs, TokenScore
from ...sampling.draw import DrawTokens
from ...sampling.logit_statistics import LogitStatistics
from ...sampling.sampling import Sampled
from ...scheduling.plan import StepPlan
from ...speculation.drafter import Drafter
from ...speculation.fixed_length import Drafted


@dataclass
class StepResult:
    """The results of a step.

    Attributes:
        tokens: the next token of each sequence that was computed to its end (all samples of a prompt at once); several where
            draft tokens were accepted.
        continuations: in beam search, each beam's candidates instead.
        prompt_logprobs: for each sequence, those of the prompt tokens that follow the computed ones.
        scores: those of each sequence's expected tokens that were reached (of all a prompt's continuations at once).
        broken: sequences whose logits are NaN or infinite.
        drafted: what became of drafts, if the executor has a drafter.
        replaced: of sequences that go on with a branch of their draft, which of their blocks gives way to which, ``(index, block)``.
    """

    tokens: dict[Sequence, list[Sampled]] = field(default_factory=dict)
    continuations: dict[Sequence, list[BeamCandidate]] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    scores: dict[Sequence, list[TokenScore]] = field(default_factory=dict)
    broken: list[Sequence] = field(default_factory=list)
    drafted: Drafted | None = None
    replaced: dict[Sequence, Copy] = field(default_factory=dict)


class RunsBatches(Protocol):
    """The part of a model that the executor needs."""

    @property
    def logit_statistics(self) -> Callable[[Tensor], LogitStatistics]: ...

    @property
    def draw_tokens(self) -> DrawTokens: ...

    def __call__(self, batch: Batch, store: KeysValues) -> Tensor: ...


class StepHandle(Protocol):
    """A started step.

    Attributes:
        completed: whether it is done already, so that starting the next one first has no benefit.
    """

    @property
    def completed(self) -> bool: ...

    def collect(self) -> StepResult:
        """Its results; waits for them."""
        ...


@dataclass(frozen=True)
class CompletedStep:
    """A step that ran synchronously."""

    found: StepResult
    completed: bool = True

    def collect(self) -> StepResult:
        """Its results."""
        return self.found


class Executor(Protocol):
    """Runs plans: with a model, or with a clock in the simulator.

    Attributes:
        model: the model; a profile wraps it with a timer.
        drafter: proposes tokens before each step; None for none. May be taken away for a while, between requests.
        drafts_at_once: whether a whole draft is computed before the host sees its first token, so that nothing can end it.
    """

    model: RunsBatches
    drafter: Drafter | None

    @property
    def most_verified(self) -> int | None:
        """The most tokens of a step with drafts; None for any number."""
        ...

    @property
    def drafts_at_once(self) -> bool: ...

    def execute(self, plan: StepPlan) -> StepHandle:
        """Start a step, or run it."""
        ...

    def runs_ahead(self, request: Request) -> bool:
        """Whether steps with this request may start before earlier ones have returned their tokens."""
        ...

    def timed(self, tokens: int, *, drafts: bool) -> Tensor:
        """Compute a step before there is any sequence, to be timed; what it writes into the cache's first block is of no use.

        Args:
            tokens: how many.
            drafts: whether it is one of the drafter's, of a token for each sequence; otherwise it is of a token and a draft for some.

        Returns:
            Something that is there when the step is done.
        """
        ...
