"""An engine's requests for asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from ...system.errors import RuntimeProblem
from ..requests.output import RequestOutput
from ..requests.sequence import Request
from .engine_thread import EngineThread

_LOG = logging.getLogger("smelt.engine")
T = TypeVar("T")


class Steps(Protocol):
    """The part of an engine that is needed here."""

    def advance(self) -> None: ...

    def submit(self, request: Request, sink: Callable[[RequestOutput], object]) -> None: ...

    def abort(self, id: str) -> None: ...


class Stream:
    """A running request's outputs. A reader that is slow finds the latest one: each contains what came before.

    Args:
        name: the request's id.
        abort: called when it is closed before its end.

    Attributes:
        interval: every how many outputs its reader gets one, besides the first and the last.
        watchers: called in the asyncio loop with each output, also with those that a slow reader does not see, and with
            the last one of a request that was aborted.
    """

    def __init__(self, name: str, abort: Callable[[str], object]) -> None:
        self.name = name
        self.interval = 1
        self.watchers: list[Callable[[RequestOutput], object]] = []
        self.loop = asyncio.get_running_loop()
        self._abort = abort
        self._latest: RequestOutput | None = None
        self._ended = self._closed = False
        self._arrived = asyncio.Event()
        self._count = 0

    def put(self, output: RequestOutput) -> None:
        """Set the latest output. Called in the asyncio loop."""
        self._latest = output
        if output.finished or self._count % self.interval == 0:
            self._arrived.set()
        self._count += 1
        for watch in self.watchers:
            watch(output)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        output, self._latest = self._latest, None
        assert output is not None
        self._ended = output.finished
        return output

    async def last(self) -> RequestOutput:
        """The last output; those before wake nobody. Nothing may have been read."""
        self.interval = sys.maxsize
        output = await anext(self)
        while not output.finished:
            output = await anext(self)
        return output

    def close(self) -> None:
        """Abort the request, unless it has ended. Who still reads gets its last output."""
        if not (self._ended or self._closed):
            self._closed = True
            self._abort(self.name)


class EngineLoop:
    """Runs an engine's requests in its thread while there are any.

    Requests come through a queue that is read between steps: whoever sends one does not wait for the step that is running.

    Args:
        engine: which may also be used directly by other threads. It has this loop, which keeps it only while its thread steps it.
        thread: that steps it, perhaps by turns with other engines.
    """

    def __init__(self, engine: Steps, thread: EngineThread) -> None:
        self._engine_of = weakref.ref(engine)
        self._kept: Steps | None = None
        self._steps_in = thread
        # Another thread that uses the engine may compute outputs, too.
        self._handing = threading.Lock()
        self._ready: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        self._running = 0
        self._submitted = 0
        self._closed = False

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs, or has not been needed yet."""
        return self._steps_in.is_alive

    @property
    def arriving(self) -> int:
        """Requests that have not reached the engine's queue."""
        return self._submitted

    @property
    def has_work(self) -> bool:
        """Whether a stream waits for something; what others ask of the engine they compute themselves."""
        return self._running > 0 or bool(self._ready)

    def submit(self, request: Request) -> Stream:
        """Queue a request. Called in an asyncio loop, which its outputs come to.

        Raises:
            RuntimeProblem: it is closed.
        """
        if self._closed:
            raise RuntimeProblem("the engine is closed")
        stream = Stream(request.id, self.abort)
        self._submitted += 1

        def hand(output: RequestOutput) -> None:
            with self._handing:
                self._ready.setdefault(stream.loop, []).append((stream, output))
                self._running -= output.finished

        def enter() -> None:
            self._submitted -= 1
            with self._handing:
                self._running += 1
            try:
                self._engine.submit(request, hand)
            except RuntimeProblem as problem:  # its reader learns of it; others are not concerned
                request.error = str(problem)
                for sequence in request.sequences:
                    sequence.finish = "error"
                hand(RequestOutput.of(request))

        self.call(enter)
        return stream

    def abort(self, name: str) -> None:
        """Abort a request before the next step."""
        self.call(lambda: self._engine.abort(name))

    def call(self, function: Callable[[], object]) -> None:
        """Call something in the engine's thread, between steps; nothing once it is closed."""
        if not self._closed:
            self._kept = self._engine
            self._steps_in.call(self, function)

    async def result(self, function: Callable[[], T]) -> T:
        """What a function returns, or raises, in the engine's thread between steps."""
        if self._closed:
            raise RuntimeProblem("the engine is closed")
        self._kept = self._engine
        return await self._steps_in.result(self, function)

    def close(self) -> None:
        """Step it no more; waits for the step that runs. Its requests must have ended, or have been aborted."""
        if not self._closed:
            self._closed = True
            if self._kept is not None:
                self._steps_in.remove(self)
                self._kept = None

    @property
    def _engine(self) -> Steps:
        engine = self._engine_of()
        assert engine is not None, "who has the loop has the engine"
        return engine

    def turn(self) -> None:
        """Compute a step, if a stream waits for one, and hand its outputs over. Called in the engine's thread."""
        if self._running > 0:
            try:
                self._engine.advance()
            except RuntimeProblem as problem:  # all requests have ended with an error, which their readers get
                _LOG.error("a step failed: %s", problem)
            except Exception:
                _LOG.exception("a step failed")
        with self._handing:
            ready, self._ready = self._ready, {}
        for loop, outputs in ready.items():
            try:
                loop.call_soon_threadsafe(_put_all, outputs)
            except RuntimeError:  # it is closed, and nobody waits for them any more
                for stream, _ in outputs:
                    self._engine.abort(stream.name)


def _put_all(outputs: list[tuple[Stream, RequestOutput]]) -> None:
    for stream, output in outputs:
        stream.put(output)
