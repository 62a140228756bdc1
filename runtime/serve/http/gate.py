"""How many requests a server works on."""

from __future__ import annotations

import asyncio
from types import TracebackType

from .errors import ApiError, busy


class RequestGate:
    """Lets requests in, up to a limit and until the server drains.

    Args:
        most: requests at a time.

    Attributes:
        inside: requests that are worked on.
        refused: how many were not let in.
        draining: whether none is let in any more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.inside = 0
        self.refused = 0
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> Pass:
        """Let a request in.

        Raises:
            ApiError: the server is full, or drains.
        """
        if self.draining:
            self.refused += 1
            raise ApiError(
                503, "The server is shutting down; send the request to another one, or later.", "service_unavailable_error",
                headers={"Retry-After": "5"},
            )  # fmt: skip
        if self.inside >= self._most:
            self.refused += 1
            raise busy(f"{self.inside} requests are being served, as many as max_requests allows; try again later.")
        return Pass(self)

    async def wait_until_empty(self, seconds: float) -> bool:
        """Whether all requests have left in time."""
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _count(self, change: int) -> None:
        self.inside += change
        if self.inside:
            self._empty.clear()
        else:
            self._empty.set()


class Pass:
    """One request's stay; closing it twice counts once."""

    def __init__(self, gate: RequestGate) -> None:
        self._gate: RequestGate | None = gate
        gate._count(1)

    def close(self) -> None:
        """The request has left."""
        if self._gate is not None:
            self._gate._count(-1)
            self._gate = None

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
