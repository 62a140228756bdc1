"""Prompts before decodes, as vLLM scheduled before chunked prefill."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain

from ...requests.sequence import Sequence
from ..plan import StepPlan
from .fcfs import FirstComeFirstServed
from .orca import whole


class PrefillFirst(FirstComeFirstServed):
    """A step has whole prompts only, while any wait and fit; otherwise all decodes.

    Requests get their first token early, and those that decode are interrupted by each arrival.
    """

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """Running prompts, then those that wait, then decodes."""
        prompts = [sequence for sequence in running if sequence.remaining > 1]
        return chain(prompts, waiting, (sequence for sequence in running if sequence.remaining <= 1))

    def count(self, sequence: Sequence, budget: int, plan: StepPlan, most: int) -> int:
        """All remaining tokens or none; none of a decode beside prompts."""
        if sequence.admitted and sequence.remaining == 1 and plan.has_prompts:
            return 0
        return whole(sequence, budget, plan, most)
