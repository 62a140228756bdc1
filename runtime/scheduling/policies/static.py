"""Static batching, a baseline."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain, islice, takewhile

from ...requests.sequence import Request, Sequence
from .fcfs import FirstComeFirstServed


class StaticBatching(FirstComeFirstServed):
    """A batch of waiting sequences starts only when the previous one has ended."""

    def __init__(self) -> None:
        self._batch: dict[int, Request] = {}  # requests with equal fields compare equal, so these are kept by identity

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        """The sequences of the batch."""
        if not any(map(self._is_of_batch, chain(running, waiting))):
            self._batch = {id(sequence.request): sequence.request for sequence in islice(waiting, places)}
        return chain(running, takewhile(self._is_of_batch, waiting))

    def _is_of_batch(self, sequence: Sequence) -> bool:
        return id(sequence.request) in self._batch
