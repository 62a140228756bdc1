"""What every request passes: its id, its size and its key."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import uuid
from collections.abc import Iterable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .errors import ApiError
from .log import RequestLog

_LOG = logging.getLogger("smelt.serve")
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# They are asked for every few seconds.
_NOT_LOGGED = ("/health", "/ready", "/metrics", "/load", "/static/")
# With keys of their own.
ADMIN_PATHS = ("/models/load", "/models/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# Whoever watches a server needs no key; the page asks for it.
_OPEN = ("/health", "/ready", "/version", "/metrics", "/static/")


class RequestGuard:
    """Gives each request an id, and refuses what is too large or has no key.

    Args:
        app: that serves the others.
        config: with the limits and the keys.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._most = config.max_body_bytes
        self._logs = config.log_requests
        self._keys, self._admin_keys = _digests(config.api_keys), _digests(config.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name

        exchange = _Exchange(receive, send, name, self._most)
        log = (
            RequestLog() if self._logs and not scope["path"].startswith(_NOT_LOGGED) and scope["path"] != "/" else None
        )
        try:
            await self._serve(scope, exchange, headers, name)
        finally:
            if log is not None:
                log.write(scope, exchange.status)

    async def _serve(self, scope: Scope, exchange: _Exchange, headers: MutableMapping[bytes, bytes], name: str) -> None:
        problem = self._problem(scope["path"], scope["method"], headers)
        if problem is None:
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception:
                if not exchange.is_too_large:
                    _LOG.exception("request %s failed: %s %s", name, scope["method"], scope["path"])
                    problem = ApiError(500, "The server failed on this request; its log says why.", "server_error")
        if exchange.is_too_large:
            problem, exchange.is_too_large = self._too_large(), False
        if problem is not None and not exchange.has_begun:
            await refuse(problem, scope["path"], name, exchange.send)

    def _problem(self, path: str, method: str, headers: MutableMapping[bytes, bytes]) -> ApiError | None:
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > self._most:
            return self._too_large()
        if path in ADMIN_PATHS:
            keys = self._admin_keys
            if not keys:
                return ApiError(404, f"{path} needs an admin key; start the server with --admin-key.")
        else:
            keys = self._keys
            if not keys or path == "/" or path.startswith(_OPEN):
                return None
        if method == "OPTIONS":
            return None
        key = _key(headers)
        if key is None:
            return ApiError(401, "There is no API key; send it as Authorization: Bearer KEY, or as x-api-key.")
        digest = hashlib.sha256(key).digest()
        # All are compared, so that the time says nothing.
        if sum(secrets.compare_digest(digest, known) for known in keys) == 0:
            return ApiError(401, "The API key is not one of this server's.", code="invalid_api_key")
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request's body has more than {self._most} bytes.", code="request_too_large")


def add_guards(app: FastAPI, config: ServerConfig) -> None:
    """Put before an application what every request passes, and which other origins' pages may call it."""
    app.add_middleware(RequestGuard, config=config)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )


class _TooLargeError(Exception):
    """A body without a length went on for too long."""


class _Exchange:
    """A request's body, up to a limit, and its response, with its id.

    Attributes:
        is_too_large: the body has more bytes; what the application answers to that is not sent.
        has_begun: the response has.
        status: of the response; None before.
    """

    def __init__(self, receive: Receive, send: Send, name: str, most: int) -> None:
        self._receive = receive
        self._send = send
        self._name = name
        self._left = most
        self.is_too_large = False
        self.has_begun = False
        self.status: int | None = None

    async def receive(self) -> Message:
        """Some of the request."""
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.is_too_large = True
            raise _TooLargeError
        return message

    async def send(self, message: Message) -> None:
        """Some of the response."""
        if self.is_too_large:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message.setdefault("headers", []).extend(_id_headers(self._name))
            self.has_begun = True
        await self._send(message)


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _key(headers: MutableMapping[bytes, bytes]) -> bytes | None:
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key") or None


def _id_headers(name: str) -> Iterable[tuple[bytes, bytes]]:
    # OpenAI's clients read the first, Anthropic's the second.
    return [(b"x-request-id", name.encode()), (b"request-id", name.encode())]


def body_of(problem: ApiError, path: str, request_id: str) -> dict[str, Any]:
    """An error in the form of the API that was called."""
    return problem.anthropic(request_id) if path.startswith("/v1/messages") else problem.openai()


async def refuse(problem: ApiError, path: str, request_id: str, send: Send) -> None:
    """Send an error as the whole response."""
    body = json.dumps(body_of(problem, path, request_id)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
