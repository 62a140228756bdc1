"""What proposes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..requests.sequence import Sequence
from ..scheduling.plan import StepPlan


@dataclass(frozen=True)
class Drafts:
    """A step's draft tokens.

    Attributes:
        of: those of some sequences.
        prepared: tokens before them that the drafter had to compute first.
        preparing: seconds that this took.
    """

    of: dict[Sequence, list[int]] = field(default_factory=dict)
    prepared: int = 0
    preparing: float = 0.0


class Drafter(Protocol):
    """Proposes tokens that may come next, for the model to verify."""

    def propose(self, plan: StepPlan) -> Drafts:
        """Draft tokens of a step. Called before every step is computed, after its blocks were moved.

        Args:
            plan: whose chunks say for how many drafts there are places.
        """
        ...

    def unprepared(self, sequence: Sequence) -> int:
        """How many tokens it would have to compute before it can draft for a sequence."""
        ...
