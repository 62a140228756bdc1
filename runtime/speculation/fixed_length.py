"""A fixed number of draft tokens, and what became of a step's. Touches no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from ..requests.sequence import Sequence
from ..scheduling.drafting import DraftSize, takes_drafts
from ..scheduling.plan import StepPlan
from .counts import DraftCounts, DraftOutcome
from .drafter import Lookup

# So many tokens must have occurred before for a fixed number of those that followed to be better than what weights say.
_SURE = 4


@dataclass(frozen=True)
class Drafted:
    """A step's drafts.

    Attributes:
        of: what became of the draft of each sequence that had one.
        drafting: seconds that the drafts took.
        prepared, preparing: tokens before the drafts that the drafter computed first, and the seconds that took besides.
    """

    of: dict[Sequence, DraftOutcome]
    drafting: float
    prepared: int = 0
    preparing: float = 0.0


class FixedDrafts:
    """The same number of draft tokens for every sequence.

    Args:
        count: how many are in a chain.
        branches: how many branches leave it.
        longest_branch: how many tokens each may have; None for as many as the chain.
        lookup: says where drafts are looked up instead, without branches; None for nowhere.

    Attributes:
        total: what became of them.
    """

    def __init__(
        self, count: int, branches: int = 0, longest_branch: int | None = 1, lookup: Lookup | None = None
    ) -> None:
        self._count = count
        self._branches = branches
        self._longest_branch = longest_branch
        self._lookup = lookup
        self.total = DraftCounts()

    def sizes(self, plan: StepPlan, budget: int) -> dict[int, DraftSize]:
        """Always the same, or as many as there is room for."""
        taking = [i for i, chunk in enumerate(plan.chunks) if takes_drafts(chunk)]
        if not taking or budget <= 0:
            return {}
        count = min(self._count, max(1, budget // len(taking)))
        found, other = (
            DraftSize(count, looks_up=True),
            DraftSize(count, self._branches, self._branches * (self._longest_branch or count)),
        )
        return {i: found if self._is_sure(plan.chunks[i].sequence) else other for i in taking}

    def _is_sure(self, sequence: Sequence) -> bool:
        return self._lookup is not None and self._lookup.matched(sequence) >= _SURE

    def begin_load(self) -> None:
        """Another load begins, which what drafts cost before says nothing of."""

    def ran(self, plan: StepPlan, drafted: Drafted, now: float) -> None:
        """Count a step's drafts.

        Args:
            plan: the step.
            drafted: its drafts.
            now: when its tokens have been recorded.
        """
        self.total.steps += bool(drafted.of)
        looked_up = looked_up_in(plan)
        for sequence, outcome in drafted.of.items():
            self.total.add(outcome, looked_up=sequence in looked_up)


def looked_up_in(plan: StepPlan) -> set[Sequence]:
    """The sequences whose drafts are looked up."""
    return {chunk.sequence for chunk in plan.chunks if chunk.looks_up}
