"""The shortest predicted output first."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain

from ...requests.sequence import Sequence
from .fcfs import FirstComeFirstServed

PATIENCE_SECONDS = 30.0


class ShortestPredicted(FirstComeFirstServed):
    """The request with the fewest tokens still to generate starts first, runs first and keeps its blocks the longest.

    The prediction is the request's own ``predicted_tokens`` where it has one, and otherwise ``max_tokens``. A request that has waited
    for ``patience`` seconds goes before all others, so that short ones cannot hold it up forever.

    Args:
        patience: in seconds.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._now = 0.0

    def begin(self, now: float) -> None:
        """Note the time."""
        self._now = now

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """Those that run by what is left, then those that wait; who has waited too long goes first."""
        return chain(sorted(running, key=self._place), sorted(waiting, key=self._place))

    def _place(self, sequence: Sequence) -> tuple[bool, int, int]:
        request = sequence.request
        is_late = self._now - request.arrived > self._patience
        return not is_late, 0 if is_late else _left(sequence), request.number


def _left(sequence: Sequence) -> int:
    request = sequence.request
    predicted = request.max_tokens if request.predicted_tokens is None else request.predicted_tokens
    return max(1, predicted - len(sequence.generated))
