"""The thread that steps engines for asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Member(Protocol):
    """An engine, as its thread sees it."""

    @property
    def has_work(self) -> bool: ...

    def turn(self) -> None: ...


class EngineThread:
    """A thread that steps one engine, or several by turns. It starts when there is something to do.

    Several engines share it because each thread that computes has OpenMP threads of its own, and libgomp lets all of them
    sleep at every barrier as soon as there are more than processors: small steps then take twice as long. For the same
    reason models that it steps are best loaded by a thread that has ended (:func:`.loading.in_own_thread`).
    """

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._inbox: deque[tuple[Member, Callable[[], object]]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it can step engines: false once it has ended by a failure."""
        return self._thread is None or self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended: it ends when it has no engines."""
        return self._thread is not None and self._thread.is_alive()

    def call(self, member: Member, function: Callable[[], object]) -> None:
        """Call something between steps; the member has turns from then on."""
        with self._wake:
            self._inbox.append((member, function))
            if not self.is_running:
                self._thread = threading.Thread(target=self._run, name="smelt-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    async def result(self, member: Member, function: Callable[[], T]) -> T:
        """What a function returns, or raises, between steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if future.done():
                return  # nobody waits any more
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value, problem = None, None
            try:
                value = function()
            except Exception as error:
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, value, problem)

        self.call(member, work)
        return await future

    def remove(self, member: Member) -> None:
        """Give a member a last turn, and no more; returns when it has had it. The thread ends with its last member."""
        done = threading.Event()

        def leave() -> None:
            member.turn()  # what it has not handed over yet
            self._members.remove(member)
            done.set()

        self.call(member, leave)
        done.wait()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not any(member.has_work for member in self._members):
                    if not self._members:
                        self._thread = None
                        return
                    self._wake.wait()
            while self._inbox:
                member, function = self._inbox.popleft()
                if member not in self._members:
                    self._members.append(member)
                function()
                # While it waits it must not keep a member that has left.
                del member, function
            for each in tuple(self._members):
                each.turn()
                del each
