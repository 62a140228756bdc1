"""The requests that must have ended by a time, the next one first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from .sequence import Request

# Of those that ended in time, before they are forgotten.
_KEPT = 64


class Deadlines:
    """Deadlines of running requests.

    Args:
        running: the requests by their ids; those that are in it no more have ended.
    """

    def __init__(self, running: Mapping[str, Request]) -> None:
        self._running = running
        self._heap: list[tuple[float, str]] = []

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is None:
            return
        if len(self._heap) > _KEPT + 2 * len(self._running):
            self._heap = [(due, id) for due, id in self._heap if id in self._running]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.due, request.id))

    def passed(self, now: float) -> list[Request]:
        """The requests that are late, once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            request = self._running.get(heapq.heappop(self._heap)[1])
            # Another one may have the id of one that has ended.
            if request is not None and request.due <= now and not request.is_finished:
                found.append(request)
        return found
