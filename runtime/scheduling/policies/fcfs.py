"""First come, first served, decodes first: the default."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain

from ...requests.sequence import Sequence
from ..plan import StepPlan


class FirstComeFirstServed:
    """The earliest request starts first, runs first and keeps its blocks the longest.

    Each step has all decodes and then pieces of prompts up to the token budget, as in SplitFuse (Holmes et al., arXiv:2401.08671)
    and Sarathi-Serve's stall-free batches (Agrawal et al., arXiv:2403.02310).
    """

    pauses = False
    swaps_ahead = False

    def begin(self, now: float) -> None:
        """Nothing to do."""

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """Those that run, as they were admitted, then those that wait, as they arrived."""
        return chain(running, waiting)

    def count(self, sequence: Sequence, budget: int, plan: StepPlan, most: int) -> int:
        """As many as the budget allows."""
        return min(sequence.remaining, budget)

    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        """The last one after it, else a beam that waits for it, else itself."""
        order = list(self.order((), running, len(running)))
        if order[-1] is not sequence:
            return order[-1]
        siblings = (s for s in reversed(order) if s.request is sequence.request and s.candidates is not None)
        return next(siblings, sequence)

    def gives_way(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """None: what runs goes on."""
        return None

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """Nothing to do."""
