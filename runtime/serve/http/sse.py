"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from .errors import ApiError

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# A client that reads nothing for so many seconds has left: it would keep its place among those that are served.
_PATIENCE = 300.0
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event.

    Args:
        data: as JSON, in one line.
        name: its kind, where clients expect one.
    """
    kind = b"" if name is None else f"event: {name}\n".encode()
    try:
        text = to_json(data, inf_nan_mode="constants")
    except (PydanticSerializationError, UnicodeEncodeError):
        # A model's output may have half of a surrogate pair; as an escape it is JSON.
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(errors="backslashreplace")
    return b"%bdata: %b\n\n" % (kind, text)


@dataclass(frozen=True)
class StreamForm:
    """What an API's streams have besides an answer's pieces.

    Attributes:
        failure: the event of what fails after the first piece.
        end: follows the last event.
    """

    failure: Callable[[ApiError], bytes]
    end: bytes = b""


OPENAI = StreamForm(lambda problem: event(problem.openai()), DONE)


class _UnreadError(Exception):
    """A client does not read its stream."""


class EventStream(StreamingResponse):
    """A response of events.

    Args:
        first: the first one, which is there already: what could be refused has been.
        rest: the others; closed when they end, or when the client goes away.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        super().__init__(_joined(first, rest), media_type="text/event-stream", headers=_HEADERS)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""

        async def sent(message: Message) -> None:
            try:
                async with asyncio.timeout(_PATIENCE):
                    await send(message)
            except TimeoutError:
                raise _UnreadError from None

        try:
            await super().__call__(scope, receive, sent)
        except _UnreadError:
            pass
        finally:
            await self._rest.aclose()


async def _joined(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for each in rest:
        yield each
