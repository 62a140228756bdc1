"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818 - not an error of anyone's
    """Nobody waits for the response any more."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled if the client closes the connection.

    Args:
        request: whose body has been read.
        work: for its response.

    Raises:
        ClientGone: the client closed it.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
