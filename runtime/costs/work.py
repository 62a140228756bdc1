"""What a step costs: the work in a plan, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ..scheduling.plan import StepPlan

# Without work for so many seconds, threads sleep and others use the caches.
PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class StepWork:
    """The amounts that decide a step's time.

    Attributes:
        tokens: whose layers are computed.
        sequences: whose next token is sampled.
        cached: positions whose keys and values are read, over all sequences.
        pairs: of a query and a key, over all sequences.
        swapped: blocks that are copied to or from host memory.
        chunks: sequences that have tokens in the step.
        prompts: those that have more than a decode's token.
        prompt_pairs: the pairs of these alone.
        after_pause: whether the engine had nothing to do before, so that threads sleep and caches are cold.
    """

    tokens: int
    sequences: int
    cached: int
    pairs: int
    swapped: int = 0
    chunks: int = 0
    prompts: int = 0
    prompt_pairs: int = 0
    after_pause: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """The work of a plan."""
        tokens = sequences = cached = pairs = prompts = prompt_pairs = 0
        for chunk in plan.chunks:
            count, stop = chunk.count, chunk.start + chunk.count
            tokens += count
            sequences += chunk.is_last
            cached += stop
            if count == 1 and chunk.is_last:
                pairs += stop
            else:
                prompts += 1
                prompt_pairs += count * chunk.start + count * (count + 1) // 2
        swapped = len(plan.swap_out) + len(plan.swap_in)
        return cls(tokens, sequences, cached, pairs + prompt_pairs, swapped, len(plan.chunks), prompts, prompt_pairs)

    @property
    def decode_cached(self) -> int:
        """Positions that decodes read: each has one query."""
        return self.pairs - self.prompt_pairs

    def later(self, steps: int) -> StepWork:
        """The work of a step of decodes alone, so many steps later."""
        more = steps * self.tokens
        return replace(self, cached=self.cached + more, pairs=self.pairs + more, swapped=0, after_pause=False)


class StepCost(Protocol):
    """How long a step takes on some device, with some model."""

    def seconds(self, work: StepWork) -> float:
        """The time of a step, the host's share included."""
        ...


@dataclass(frozen=True)
class LinearCost:
    """A step's time as a sum of its amounts, each at its price in seconds.

    Attributes:
        step: of any step.
        token, sequence, cached, pair, swapped: of one of each.
    """

    step: float
    token: float = 0.0
    sequence: float = 0.0
    cached: float = 0.0
    pair: float = 0.0
    swapped: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """The sum."""
        return (
            self.step
            + self.token * work.tokens
            + self.sequence * work.sequences
            + self.cached * work.cached
            + self.pair * work.pairs
            + self.swapped * work.swapped
        )
