"""Prompts before decodes, as vLLM scheduled before chunked prefill."""

from __future__ import annotations

from ...requests.sequence import Sequence
from ..plan import StepPlan
from .fcfs import FirstComeFirstServed
from .orca import whole


class PrefillFirst(FirstComeFirstServed):
    """A step has whole prompts only, while any wait and fit; otherwise all decodes.

    Requests get their first token early, and those that decode are interrupted by each arrival.
    """

    prompts_first = True

    def count(self, sequence: Sequence, budget: int, plan: StepPlan, most: int) -> int:
        """All remaining tokens or none."""
        return whole(sequence, budget, plan, most)
