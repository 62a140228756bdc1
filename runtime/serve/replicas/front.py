"""What listens in front of replicas: each request goes to one of them, and its answer comes back as it is."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import Counter
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ..http.config import ServerConfig
from ..http.errors import ApiError, stopping
from ..http.gate import RequestGate
from ..http.middleware import add_guards, body_of
from ..http.sse import DONE, event
from .merged_metrics import merged
from .replica import LOGGED, REPLICA, HttpRequest
from .session import HEADER, session_key

_LOG = logging.getLogger("smelt.serve")
# A request that kills replicas must not reach all of them.
_ATTEMPTS = 2
_FULL = 429
# A session's requests that its replica has beyond its even share of all, before others go anywhere.
_OVER_SHARE = 4
_EVENTS = b"text/event-stream"
_IDS = (b"x-request-id", b"request-id")
# The front has checked the keys.
_NOT_SENT = (b"authorization", b"x-api-key", b"x-request-id")


class Front:
    """The front.

    Args:
        replicas: a Ray Serve handle of their deployment.
        latest: has their metrics; an actor's handle.
        config: the options.
        count: how many replicas there are.

    Attributes:
        gate: who is let in.
        app: for an ASGI server.
    """

    def __init__(self, replicas: Any, latest: Any, config: ServerConfig, count: int) -> None:
        self.config = config
        self.gate = RequestGate(config.max_requests)
        self._replicas = replicas.options(method_name="asgi", stream=True)
        self._latest = latest
        self._count = count
        self._of_session = Counter[str]()
        self._places = Places(count)
        self._exchanges = set[_Exchange]()
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._add_status()
        self.app.mount("/", self._forward)
        add_guards(self.app, config)

    def _add_status(self) -> None:
        @self.app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if await self._is_alive() else 503)

        @self.app.get("/ready")
        async def ready() -> Response:
            return Response(status_code=200 if not self.gate.draining and await self._is_alive() else 503)

        @self.app.get("/load")
        async def load() -> dict[str, int]:
            return {"server_load": self.gate.inside}

        @self.app.get("/metrics")
        async def metrics() -> Response:
            page = merged(await self._pages() or {}) + self._refusals()
            return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _refusals(self) -> bytes:
        """What was not let in here, which no replica knows of."""
        name = f"{self.config.metrics_prefix}:front_rejections_total"
        about = "Requests that were refused before they reached a replica."
        return f"# HELP {name} {about}\n# TYPE {name} counter\n{name} {self.gate.refused}.0\n".encode()

    def give_up(self) -> None:
        """Break off the requests that have not been answered."""
        for exchange in list(self._exchanges):
            exchange.give_up()

    async def _is_alive(self) -> bool:
        """Whether some replica is."""
        return await self._pages() != {}

    async def _pages(self) -> dict[str, str] | None:
        """Each replica's metrics; None while what collects them is started again."""
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

        try:
            found: dict[str, str] = await self._latest.texts.remote()
        except RayActorError:
            return None
        return found

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name = str(scope["state"]["request_id"])
        try:
            await self._answer(request, name, send)
        except ApiError as problem:
            response = JSONResponse(body_of(problem, request.scope["path"], name), problem.status, problem.headers)
            await response(scope, receive, send)
        except ClientDisconnect:
            return

    async def _answer(self, request: Request, name: str, send: Send) -> None:
        is_work = request.method == "POST"
        entered = self.gate.enter() if is_work else None
        try:
            body = await request.body()
            headers = [pair for pair in request.scope["headers"] if pair[0] not in _NOT_SENT]
            headers.append((b"x-request-id", name.encode()))
            sent = HttpRequest(request.method, request.scope["path"], request.scope["query_string"], headers, body)
            key = self._affine(session_key(dict(headers).get(HEADER), body) if is_work else None)
            exchange = _Exchange(self._replicas, self._places, sent, key, name, send, request)
            self._exchanges.add(exchange)
            self._of_session[key or ""] += 1
            try:
                await exchange.run()
            finally:
                self._exchanges.discard(exchange)
                self._of_session[key or ""] -= 1
                if not self._of_session[key or ""]:
                    del self._of_session[key or ""]
        finally:
            if entered is not None:
                entered.close()

    def _affine(self, key: str | None) -> str | None:
        """The session that decides a request's replica; None if its replica has more than its share of the work by this session alone."""
        if key is None or self._of_session[key] < self.gate.inside / self._count + _OVER_SHARE:
            return key
        return None


class Places:
    """Which session has led to which replica lately: Ray takes no replica by its name, but the same one for the same session.

    Args:
        count: how many replicas there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._sessions: dict[bytes, str] = {}

    def saw(self, replica: bytes, session: str) -> None:
        """A replica has answered a request of a session."""
        self._sessions.pop(replica, None)
        self._sessions[replica] = session
        while len(self._sessions) > self._count:  # of those that were replaced
            del self._sessions[next(iter(self._sessions))]

    def elsewhere(self, replica: bytes) -> str:
        """A session that leads to another one; any, while none is known."""
        others = [session for name, session in self._sessions.items() if name != replica]
        return random.choice(others) if others else _any_session()


def _any_session() -> str:
    return uuid.uuid4().hex


class _Full(Exception):  # noqa: N818 - no failure: another replica may have room
    """A replica takes no more requests."""

    def __init__(self, replica: bytes) -> None:
        super().__init__(replica)
        self.replica = replica


class _Exchange:
    """One request's way to a replica and back."""

    def __init__(
        self,
        replicas: Any,
        places: Places,
        request: HttpRequest,
        key: str | None,
        name: str,
        send: Send,
        asked: Request,
    ) -> None:
        self._replicas = replicas
        self._places = places
        self._session = key or _any_session()
        self._request = request
        self._name = name
        self._send = send
        self._asked = asked
        self._given_up = asyncio.Event()
        # Of a full replica the request may go to another one, once.
        self._insists = False
        self._streams = False
        self._begun = False

    async def run(self) -> None:
        """Send what a replica answers; if it dies before it has answered, what another does."""
        work = asyncio.ensure_future(self._work())
        gone = asyncio.ensure_future(self._gone())
        given_up = asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({work, gone, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            unfinished = not work.done()
            gone.cancel()
            given_up.cancel()
            if unfinished:
                work.cancel()
                await asyncio.wait({work})
        if unfinished and self._given_up.is_set():
            await self._break_off(stopping())

    def give_up(self) -> None:
        """The server stops."""
        self._given_up.set()

    async def _gone(self) -> None:
        while (await self._asked.receive())["type"] != "http.disconnect":
            pass

    async def _work(self) -> None:
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                try:
                    await self._once()
                except _Full as full:
                    self._session = self._places.elsewhere(full.replica)
                    await self._once()
                return
            except RayActorError:
                _LOG.warning("request %s: its replica has died, attempt %d of %d", self._name, attempt, _ATTEMPTS)
                if self._begun:
                    await self._break_off(
                        ApiError(
                            502,
                            "The replica that answered this request has died; send it again.",
                            "server_error",
                            "replica_died",
                        )
                    )
                    return
        raise ApiError(
            503, "The replicas that got this request died; send it again later.", "service_unavailable_error",
            "replica_died", headers={"Retry-After": "5"},
        )  # fmt: skip

    async def _once(self) -> None:
        messages = self._replicas.options(session_id=self._session).remote(self._request)
        start = None
        try:
            async for message in messages:
                if message["type"] == LOGGED:
                    self._asked.scope["state"]["answered"] = message["fields"]
                    continue
                if message["type"] == "http.response.start":
                    start = message
                    replica = dict(message["headers"]).get(REPLICA, b"")
                    self._places.saw(replica, self._session)
                    if message["status"] == _FULL and not self._insists:
                        self._insists = True
                        raise _Full(replica)
                    continue
                if start is not None:
                    # Only now, so that another replica can answer if this one dies in between.
                    await self._send(self._started(start))
                    start = None
                await self._send(message)
        except BaseException:
            messages.cancel()
            raise

    def _started(self, message: Message) -> Message:
        self._begun = True
        headers = message["headers"]
        self._streams = any(name == b"content-type" and value.startswith(_EVENTS) for name, value in headers)
        # The guard in front writes these.
        return {**message, "headers": [pair for pair in headers if pair[0] not in _IDS]}

    async def _break_off(self, problem: ApiError) -> None:
        """Say in the stream that the rest will not come. A whole answer is cut short, which clients see by its length."""
        if not self._begun:
            raise problem
        if not self._streams:
            raise ConnectionResetError(str(problem))
        path = self._request.path
        named = path.startswith("/v1/messages")
        last = event(body_of(problem, path, self._name), "error" if named else None)
        last += b"" if named or path == "/v1/responses" else DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
