"""Requests by the priority that their sender gave them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from ...requests.sequence import Request, Sequence
from .fcfs import FirstComeFirstServed


class PriorityOrder(FirstComeFirstServed):
    """Lower numbers first, as in vLLM; equal ones in order of arrival.

    A request takes places, and blocks if it lacks them, from those of higher numbers. Who loses only its place goes on later
    where it was.
    """

    pauses = True

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """By priority."""
        return sorted([*running, *waiting], key=self._place)

    def gives_way(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """The last of those with a higher number."""
        last = max(running, key=self._place, default=sequence)
        return last if self.urgency(last.request) > self.urgency(sequence.request) else None

    def urgency(self, request: Request) -> float:
        """Lower ones go first."""
        return request.priority

    def _place(self, sequence: Sequence) -> tuple[float, int]:
        return self.urgency(sequence.request), sequence.request.number
