"""Requests by the time at which they must have ended."""

from __future__ import annotations

from ...requests.sequence import Request
from .priority import PriorityOrder


class EarliestDeadlineFirst(PriorityOrder):
    """The request whose deadline is the earliest goes first; those without one, in order of arrival, after all others."""

    def urgency(self, request: Request) -> float:
        """When it is due."""
        return request.due
