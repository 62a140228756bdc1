"""A proxy before a server, which takes some of its abilities away."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import uvicorn

# From a request's body to the one that is passed on, or to the sentence of a refusal.
Change = Callable[[dict[str, Any]], dict[str, Any] | str]


@dataclass
class Proxy:
    """An ASGI application.

    Attributes:
        upstream: the server's address.
        change: what becomes of bodies.
        answers: to be given instead of the server's, by path.
        breaks_after: parts of a stream, after which the connection is closed, or ``last`` is sent.
        last: sent instead of the rest of a stream.
        passed: the bodies that came through.
        inside: requests that are being answered.
        most_inside: the most of them at a time.
        connections: the clients' addresses and ports.
    """

    upstream: str
    change: Change = lambda body: body
    answers: dict[str, Any] = field(default_factory=dict)
    breaks_after: int | None = None
    last: bytes = b""
    passed: list[dict[str, Any]] = field(default_factory=list)
    inside: int = 0
    most_inside: int = 0
    connections: set[tuple[str, int]] = field(default_factory=set)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] in self.answers:
            await self._send(send, 200, self.answers[scope["path"]])
            return
        if body:
            changed = self.change(json.loads(body))
            if isinstance(changed, str):
                await self._send(send, 400, {"error": {"message": changed}})
                return
            body = json.dumps(changed).encode()
            self.passed.append(changed)
        self.connections.add(tuple(scope["client"]))
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await self._pass(scope, body, send)
        finally:
            self.inside -= 1

    async def _pass(self, scope: Any, body: bytes, send: Any) -> None:
        kept = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"content-type")]
        url = self.upstream + scope["path"]
        async with (
            httpx2.AsyncClient(timeout=60) as client,
            client.stream(scope["method"], url, content=body, headers=kept) as response,
        ):
            kind = response.headers["content-type"].encode()
            start = {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": [(b"content-type", kind)],
            }
            await send(start)
            count = 0
            async for part in response.aiter_bytes():
                # A part may hold several events.
                for event in part.split(b"\n\n") if kind.startswith(b"text/event-stream") else [part]:
                    if kind.startswith(b"text/event-stream"):
                        event = event + b"\n\n" if event else b""
                    if not event:
                        continue
                    if count == self.breaks_after:
                        if not self.last:
                            raise RuntimeError("the proxy breaks as it should")
                        await send({"type": "http.response.body", "body": self.last})
                        return
                    count += 1
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Any, status: int, data: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(data).encode()})


@contextlib.contextmanager
def listening(application: Any) -> Iterator[str]:
    """Serve an ASGI application at a free port of this machine; its address."""
    runner = uvicorn.Server(uvicorn.Config(application, log_level="critical", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as found:
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [found]}, daemon=True)
        thread.start()
        while not runner.started:
            assert thread.is_alive(), "the proxy has not started"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{found.getsockname()[1]}"
        finally:
            runner.should_exit = True
            thread.join(10)


def without(*fields: str) -> Change:
    """Refuses requests with any of these fields, as servers do that are strict; ``ids`` are prompts of token ids."""

    def change(body: dict[str, Any]) -> dict[str, Any] | str:
        prompt = body.get("prompt")
        if "ids" in fields and prompt is not None and not isinstance(prompt, str):
            return "prompt must be a string"
        known = {**body, **(body.get("stream_options") or {})}
        wrong = next((name for name in fields if name in known), None)
        return body if wrong is None else f"Unrecognized request argument: {wrong}"

    return change
