"""A server's process: its socket, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from ...system.errors import RuntimeProblem
from .http.config import ServerConfig
from .http.gate import RequestGate

_LOG = logging.getLogger("smelt.serve")
# Headers are small; bodies have their own limit.
_MOST_HEADER_BYTES = 64 << 10
# Python's own is 5 ms: the time of a small model's step, which the engine's thread would wait whenever the event loop is busy, and the other way round.
_SWITCH_SECONDS = 0.0002
# Until errors have been sent.
_GIVING_UP_SECONDS = 3.0


class Drains(Protocol):
    """An application that can be let run out."""

    gate: RequestGate
    config: ServerConfig
    app: FastAPI

    def give_up(self) -> None:
        """Answer all that is not finished with an error."""
        ...


class _Draining(uvicorn.Server):
    """Lets running requests end before it stops; a second signal stops it at once."""

    def __init__(self, config: uvicorn.Config, server: Drains) -> None:
        super().__init__(config)
        self._server = server
        self._drains: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal."""
        if self._drains is not None:
            super().handle_exit(sig, frame)
            return
        gate = self._server.gate
        gate.draining = True
        _LOG.info(
            "stopping: %d requests are still served, for at most %g s", gate.inside, self._server.config.drain_seconds
        )
        self._drains = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if not await self._server.gate.wait_until_empty(self._server.config.drain_seconds):
            _LOG.warning("stopping with %d requests unfinished", self._server.gate.inside)
            self._server.give_up()
            await self._server.gate.wait_until_empty(_GIVING_UP_SECONDS)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that a server listens on.

    Raises:
        RuntimeProblem: the address is not this machine's, or is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise RuntimeProblem(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --host or --port"
        ) from None
    # asyncio sets it only where a socket names its protocol; without it each event waits for the one before to be acknowledged.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def share_interpreter() -> None:
    """Let a process's event loop and its engine's thread take turns quickly."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def run(server: Drains, listening: socket.socket) -> None:
    """Serve until a signal ends it; running requests end first.

    Args:
        server: with its models loaded.
        listening: from :func:`listen`.
    """
    share_interpreter()
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_graceful_shutdown=1,
    )
    with contextlib.suppress(KeyboardInterrupt):
        _Draining(config, server).run(sockets=[listening])
