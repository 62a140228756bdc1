"""Drafts that are looked up where that is better, and come from weights elsewhere."""

from __future__ import annotations

from dataclasses import replace

from ..requests.sequence import Sequence
from ..scheduling.plan import StepPlan
from .drafter import Chains, Drafter, Drafts
from .lookup import LookupDrafter
from .stepwise import StepwiseDrafter


class LookupFirst:
    """Two drafters, of which each draft in a plan is one's.

    Text that repeats itself, as code that is edited, a document that is quoted or a loop, is drafted at no cost and further; what is new is left to weights.

    Args:
        lookup: drafts what is to be looked up.
        weights: drafts all else.

    Attributes:
        longest_branch: as that of the weights; what is looked up has no branches.
    """

    def __init__(self, lookup: LookupDrafter, weights: StepwiseDrafter) -> None:
        self.lookup, self.weights = lookup, weights
        self.longest_branch = weights.longest_branch

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Drafts of both."""
        looked_up = [chunk for chunk in plan.chunks if chunk.looks_up]
        if not looked_up:
            return self.weights.propose(plan, chains)
        found = self.lookup.propose(replace(plan, chunks=looked_up))
        others = [chunk for chunk in plan.chunks if not chunk.looks_up]
        drafts = self.weights.propose(replace(plan, chunks=others), chains)
        return replace(drafts, of={**found.of, **drafts.of})

    def unprepared(self, sequence: Sequence) -> int:
        """As the weights have it."""
        return self.weights.unprepared(sequence)

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """As the weights have it."""
        self.weights.replaced(sequence, block, by)


def lookup_of(drafter: Drafter | None) -> LookupDrafter | None:
    """What looks drafts up, if something does."""
    drafter = drafter.lookup if isinstance(drafter, LookupFirst) else drafter
    return drafter if isinstance(drafter, LookupDrafter) else None


def weights_of(drafter: Drafter | None) -> StepwiseDrafter | None:
    """What drafts with weights, if something does."""
    drafter = drafter.weights if isinstance(drafter, LookupFirst) else drafter
    return drafter if isinstance(drafter, StepwiseDrafter) else None
