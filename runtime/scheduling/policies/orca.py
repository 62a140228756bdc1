"""Iteration-level scheduling with whole prompts, a baseline."""

from __future__ import annotations

from ...requests.sequence import Sequence
from ..plan import StepPlan
from .fcfs import FirstComeFirstServed


def whole(sequence: Sequence, budget: int, plan: StepPlan, most: int) -> int:
    """All remaining tokens or none; a prompt that no step could hold is computed in pieces of whole steps."""
    if sequence.remaining <= budget:
        return sequence.remaining
    return budget if sequence.remaining > most and not plan.chunks else 0


class IterationLevel(FirstComeFirstServed):
    """As in Orca (Yu et al., OSDI 2022): each step has all decodes and whole prompts, first come, first served.

    Decodes wait for long prompts in the same step. Prompts longer than the token budget, which Orca does not have, are computed
    in pieces.
    """

    def count(self, sequence: Sequence, budget: int, plan: StepPlan, most: int) -> int:
        """All remaining tokens or none."""
        # Decodes are in every step, so a prompt that is longer than one must share it with them.
        return budget if sequence.remaining > most else whole(sequence, budget, plan, most)
