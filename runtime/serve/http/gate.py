"""How many requests a server works on."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol

from .errors import ApiError, busy


class Used(Protocol):
    """A model that counts the requests that it is in use by."""

    in_use: int


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

    def enter(self, model: Used | None = None) -> Pass:
        """Let a request in.

        Args:
            model: that it is for, which counts it.

        Raises:
            ApiError: the server is full, or drains.
        """
        self.check_open()
        if self.inside >= self._most:
            self.refused += 1
            raise busy(f"{self.inside} requests are being served, as many as max_requests allows; try again later.")
        return Pass(self, model)

    def check_open(self) -> None:
        """Refuse a request while the server drains.

        Raises:
            ApiError: it does.
        """
        if self.draining:
            self.refused += 1
            raise ApiError(
                503, "The server is shutting down; send the request to another one, or later.", "service_unavailable_error",
                headers={"Retry-After": "5"},
            )  # fmt: skip

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

    def __init__(self, gate: RequestGate, model: Used | None) -> None:
        self._gate: RequestGate | None = gate
        self._model = model
        gate._count(1)
        if model is not None:
            model.in_use += 1

    def close(self) -> None:
        """The request has left."""
        if self._gate is not None:
            self._gate._count(-1)
            self._gate = None
            if self._model is not None:
                self._model.in_use -= 1
                self._model = None

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
