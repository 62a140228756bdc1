"""SARATHI's decode-maximal batches."""

from __future__ import annotations

from ...requests.sequence import Sequence
from ..plan import StepPlan
from .fcfs import FirstComeFirstServed


class DecodeMaximal(FirstComeFirstServed):
    """As in SARATHI (Agrawal et al., arXiv:2308.16369): each step has all decodes and one piece of one prompt.

    The piece fills the token budget, unless its prompt ends before.
    """

    def count(self, sequence: Sequence, budget: int, plan: StepPlan, most: int) -> int:
        """A decode's token, or a piece of the step's only prompt."""
        if sequence.remaining > 1 and any(chunk.count > 1 or not chunk.is_last for chunk in plan.chunks):
            return 0
        return min(sequence.remaining, budget)
