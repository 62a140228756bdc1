"""What a step costs: the work in a plan, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..scheduling.plan import StepPlan


@dataclass(frozen=True)
class StepWork:
    """The amounts that decide a step's time.

    Attributes:
        tokens: whose layers are computed.
        sequences: whose next token is sampled.
        cached: positions whose keys and values are read, over all sequences.
        pairs: of a query and a key, over all sequences.
        swapped: blocks that are copied to or from host memory.
    """

    tokens: int
    sequences: int
    cached: int
    pairs: int
    swapped: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """The work of a plan."""
        tokens = sequences = cached = pairs = 0
        for chunk in plan.chunks:
            count, stop = chunk.count, chunk.start + chunk.count
            tokens += count
            sequences += chunk.is_last
            cached += stop
            pairs += stop if count == 1 else count * chunk.start + count * (count + 1) // 2
        return cls(tokens, sequences, cached, pairs, len(plan.swap_out) + len(plan.swap_in))

    def later(self, steps: int) -> StepWork:
        """The work of a step of decodes alone, so many steps later."""
        more = steps * self.tokens
        return StepWork(self.tokens, self.sequences, self.cached + more, self.pairs + more)


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
