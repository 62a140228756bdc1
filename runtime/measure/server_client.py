"""A client of a server with OpenAI's API, whose failures are one sentence each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx2

from ...system.errors import RuntimeProblem

_CONNECT_SECONDS = 10.0
# A prompt may wait behind many others for its first token.
_SILENCE_SECONDS = 600.0
_LONGEST_MESSAGE = 300


class ServerProblem(RuntimeProblem):
    """A server that cannot be reached, refused a request or failed on it.

    Args:
        sentence: what happened, and what to do.
        status: of HTTP; None if the server did not answer.
    """

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class ServerClient:
    """Requests to one server, over connections that stay open. Use as an asynchronous context manager.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: sent with each request.
        connections: the most at a time.

    Attributes:
        url: without ``/v1``.

    Raises:
        RuntimeProblem: the address or the key cannot be one.
    """

    def __init__(self, url: str, api_key: str | None = None, *, connections: int = 16) -> None:
        self.url = _base(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise RuntimeProblem("--api-key: is empty or has characters that no HTTP header can have; correct it")
        self._has_key = api_key is not None
        self._connections = connections
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key is not None else {},
            timeout=httpx2.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """What is at a path.

        Raises:
            ServerProblem: the server has nothing there, or cannot be reached.
        """
        return await self._answer("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request.

        Raises:
            ServerProblem: the server refuses it, fails, or cannot be reached.
        """
        return await self._answer("POST", path, body)

    async def post_all(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers to many requests, in their order; as many run at a time as there are connections.

        Raises:
            ServerProblem: one of them failed; the others are given up.
        """
        answers: list[Any] = [None] * len(bodies)
        waiting = iter(enumerate(bodies))

        async def work() -> None:
            for place, body in waiting:
                answers[place] = await self.post(path, body)

        await together([work() for _ in range(min(self._connections, len(bodies)))])
        return answers

    async def stream(self, path: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer as they come. To be read to its end, so that its connection is used again.

        Raises:
            ServerProblem: the server refuses the request, or fails before the answer is complete.
        """
        complete = False
        request = self._http.build_request(
            "POST", self.url + path, content=body, headers={"Content-Type": "application/json"}
        )
        try:
            response = await self._sent(request)
            async with contextlib.aclosing(response):
                if not response.is_success:
                    await response.aread()
                    self._refuse(path, response)
                async for line in _lines(response):
                    data = line.removeprefix(b"data:").strip()
                    if data == line or not data:
                        continue
                    if data == b"[DONE]":
                        complete = True
                        continue
                    chunk = self._chunk(data)
                    complete |= any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
                    yield chunk
        except httpx2.RequestError as error:
            raise self._lost(error) from None
        if not complete:
            raise ServerProblem(f"{self.url}: ended an answer before it was complete; its log may say why")

    async def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = await self._sent(self._http.build_request(method, self.url + path, json=body))
            await response.aread()
        except httpx2.RequestError as error:
            raise self._lost(error) from None
        if not response.is_success:
            self._refuse(path, response)
        try:
            return response.json()
        except ValueError:
            raise ServerProblem(
                f"{self.url}{path}: is not JSON; give the address of a server with OpenAI's API", response.status_code
            ) from None

    async def _sent(self, request: httpx2.Request) -> httpx2.Response:
        """A response, not read yet. A request is sent again, once, if its connection was closed instead of answering.

        Servers close a connection after so many requests, llama.cpp's without a word, perhaps just as the next one is sent.
        """
        try:
            return await self._http.send(request, stream=True)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            return await self._http.send(request, stream=True)

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise ServerProblem(f"{self.url}: sent a part of a stream that is no JSON object; its log may say why")
        if chunk.get("error"):
            error = chunk["error"]
            code = error.get("code") if isinstance(error, dict) else None
            raise ServerProblem(
                f"{self.url}: failed in the middle of an answer ({_message(chunk)}); its log may say why",
                code if isinstance(code, int) else 500,
            )
        return chunk

    def _refuse(self, path: str, response: httpx2.Response) -> NoReturn:
        status = response.status_code
        try:
            said = _message(response.json())
        except ValueError:
            said = _short(response.text)
        answered = f"{status}{f': {said}' if said else ''}"
        if status in (401, 403):
            what = "refuses the API key" if self._has_key else "needs an API key"
            sentence = f"{what} ({answered}); give one that it knows with --api-key"
        elif status in (429, 503):
            sentence = f"has no room for another request ({answered}); lower the concurrency, or try again later"
        elif status >= 500:
            sentence = f"failed on {path} ({answered}); its log may say why"
        else:
            sentence = f"refused {path} ({answered}); change what it names, or try another server"
        raise ServerProblem(f"{self.url}: {sentence}", status)

    def _lost(self, error: httpx2.RequestError) -> ServerProblem:
        said = _short(str(error)) or type(error).__name__
        if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol)):
            return ServerProblem(f"{self.url}: cannot be reached ({said}); start the server, or correct the address")
        if isinstance(error, httpx2.TimeoutException):
            return ServerProblem(f"{self.url}: was silent for {_SILENCE_SECONDS:.0f} seconds; its log may say why")
        return ServerProblem(
            f"{self.url}: closed the connection in the middle of an answer ({said}); its log may say why"
        )


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    # Not the client's own lines: texts may hold characters that Unicode calls line ends, and data does not end there.
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    yield rest


def _base(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise RuntimeProblem(f"--server {url}: is not the address of a server, such as http://localhost:8000")
    return re.sub(r"(/v1(/(chat/)?completions)?)?/*$", "", url)


def _message(body: Any) -> str:
    """What an error's body says, in whatever form."""
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), "")
    return _short(body if isinstance(body, str) else json.dumps(body))


def _short(text: str) -> str:
    words = " ".join(text.split()).rstrip(".")
    return words if len(words) <= _LONGEST_MESSAGE else f"{words[:_LONGEST_MESSAGE]}…"
