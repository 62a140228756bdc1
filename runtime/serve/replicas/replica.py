"""One replica: an engine and the whole application, which answers requests that its front sends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.types import Message

from ...engine.setup.config import EngineConfig
from ..app import Server
from ..http.config import ServerConfig
from ..http.log import answered
from ..model.answer_format import AnswerOptions
from ..model.loader import ModelLoader, load_all
from ..model.models import ServedModels
from ..run import share_interpreter

_LOG = logging.getLogger("smelt.serve")
_PUSH_SECONDS = 1.0
# What is sent and not read yet: a replica goes on meanwhile, and merges what comes.
_MESSAGES_AHEAD = 4
# The header that says which replica has answered.
REPLICA = b"x-smelt-replica"
# The message before an answer's last one: what the front logs of it.
LOGGED = "smelt.logged"


@dataclass(frozen=True)
class ReplicaPlan:
    """What each replica serves.

    Attributes:
        models: paths by name; the first is the default.
        adapters: of the first, by name.
        engine: the options of each engine.
        config: the server's, without what the front does.
        answers: how the models answer.
        shares: how many engines share the memory of `engine`; by default one for each model.
    """

    models: dict[str, Path]
    adapters: dict[str, str]
    engine: EngineConfig
    config: ServerConfig
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    shares: int | None = None


@dataclass(frozen=True)
class HttpRequest:
    """A request, with its whole body."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class EngineReplica:
    """Serves one engine's share of the requests. Ray makes it.

    Args:
        plan: what it serves.
        latest: gets its metrics; an actor, or None outside of Ray.
    """

    def __init__(self, plan: ReplicaPlan, latest: Any = None) -> None:
        share_interpreter()
        # Which of several answers is not known before, and the same request twice is not to have the same answer.
        engine = replace(plan.engine, seed=secrets.randbits(62))
        loader = ModelLoader(engine, plan.shares or len(plan.models), plan.answers)
        self._server = Server(ServedModels(load_all(loader, plan.models, plan.adapters)), plan.config)
        self._name = "alone"
        if latest is not None:
            from ray import serve  # pyright: ignore[reportMissingImports]

            self._name = name = str(serve.get_replica_context().replica_id.unique_id)
            threading.Thread(target=self._push, args=(latest, name), daemon=True).start()

    def _push(self, latest: Any, name: str) -> None:
        while True:
            try:
                latest.put.remote(name, self._server.metrics.text().decode())
            except Exception:  # the next one may succeed
                _LOG.exception("metrics were not sent")
            time.sleep(_PUSH_SECONDS)
            if not self._is_alive:
                _end()

    def check_health(self) -> None:
        """Raise if it can serve no more: Ray then replaces it."""
        if not self._is_alive:
            raise RuntimeError("the engine has ended")

    @property
    def _is_alive(self) -> bool:
        return all(model.is_alive for model in self._server.models)

    async def asgi(self, request: HttpRequest) -> AsyncIterator[dict[str, Any]]:
        """Answer a request: messages of ASGI, and what is logged of it. Its client has gone if this is closed or cancelled."""
        has_gone = asyncio.Event()
        messages: asyncio.Queue[Message] = asyncio.Queue(_MESSAGES_AHEAD)
        body = [request.body]

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await has_gone.wait()
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": None,
            "server": None,
            "state": {},
        }
        work = asyncio.ensure_future(self._server.app(scope, receive, messages.put))
        try:
            while True:
                message = await _next(messages, work)
                if message["type"] == "http.response.start":
                    if message["status"] >= 500 and not self._is_alive:
                        _end()
                    message["headers"] = [*message["headers"], (REPLICA, self._name.encode())]
                is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
                if is_last:  # before its end, after which the front waits for nothing more
                    yield {"type": LOGGED, "fields": answered(scope["state"])}
                yield dict(message)
                if is_last:
                    return
        finally:
            has_gone.set()
            if not work.done():
                work.cancel()


def _end() -> None:
    """End this process, whose engine cannot work any more: requests without an answer then go to another replica, and Ray starts a new one."""
    _LOG.error("the engine has ended, and this replica with it")
    logging.shutdown()
    os._exit(1)


async def _next(messages: asyncio.Queue[Message], work: asyncio.Future[None]) -> Message:
    """The next message; what the application failed with, if it has."""
    if not messages.empty():
        return messages.get_nowait()
    coming = asyncio.ensure_future(messages.get())
    await asyncio.wait({coming, work}, return_when=asyncio.FIRST_COMPLETED)
    if coming.done():
        return coming.result()
    coming.cancel()
    if not messages.empty():
        return messages.get_nowait()
    work.result()
    raise RuntimeError("the application has ended without a response")


class LatestMetrics:
    """The replicas' metrics as they were last. Ray makes it."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[float, str]] = {}

    def put(self, name: str, text: str) -> None:
        """A replica's metrics."""
        self._texts[name] = time.monotonic(), text

    def texts(self) -> dict[str, str]:
        """Those of replicas that live."""
        oldest = time.monotonic() - 5 * _PUSH_SECONDS
        self._texts = {name: each for name, each in self._texts.items() if each[0] >= oldest}
        return {name: text for name, (_, text) in self._texts.items()}
