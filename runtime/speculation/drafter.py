"""What proposes tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ..requests.sequence import Sequence
from ..scheduling.plan import StepPlan
from .tree import TokenTree


@dataclass(frozen=True)
class Drafts:
    """A step's draft tokens.

    Attributes:
        of: those of some sequences, each a chain or a tree.
        prepared: tokens before them that the drafter had to compute first.
        preparing: seconds that this took.
    """

    of: dict[Sequence, TokenTree] = field(default_factory=dict)
    prepared: int = 0
    preparing: float = 0.0


@dataclass(frozen=True)
class PlannedChain:
    """A draft that is to be computed elsewhere.

    Attributes:
        start, stop: the positions that the drafter's first step for it computes, after the last of which the first token comes.
        longest: how many tokens it is to have.
    """

    start: int
    stop: int
    longest: int


@dataclass(frozen=True)
class DraftedChain:
    """What was computed of it.

    Attributes:
        tokens: all of them.
        of_use: how many are, from the first on.
    """

    tokens: list[int]
    of_use: int


Chains = Callable[[dict[Sequence, PlannedChain]], dict[Sequence, DraftedChain]]


class Lookup(Protocol):
    """Says what would be looked up for a sequence, and how good that is."""

    def matched(self, sequence: Sequence) -> int:
        """How many of its last tokens occurred before, where a draft would begin; 0 if there would be none."""
        ...

    def share(self, sequence: Sequence) -> float:
        """How often tokens of such a draft are right if those before them are; 0 if there would be none."""
        ...


class Drafter(Protocol):
    """Proposes tokens that may come next, for the model to verify.

    Attributes:
        longest_branch: how many tokens its branches may have; None for as many as its chains.
    """

    longest_branch: int | None

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Draft tokens of a step. Called before every step is computed, after its blocks were moved.

        Args:
            plan: whose chunks say for how many drafts there are places.
            chains: computes them elsewhere, without branches and constraints; None to choose each token here. Only where the
                drafter has steps of its own.
        """
        ...

    def unprepared(self, sequence: Sequence) -> int:
        """How many tokens it would have to compute before it can draft for a sequence."""
        ...

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """A sequence gets another block for one of its own, which had the same up to where a branch left the chain."""
        ...
