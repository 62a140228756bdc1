"""Streams whose client stops reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from smelt.runtime.serve.http import sse
from starlette.types import Message


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_client_that_reads_nothing_gives_its_place_back(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's version, and the latest."""
    monkeypatch.setattr(sse, "_PATIENCE", 0.05)
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            closed.append(True)

    async def serve() -> int:
        count = 0

        async def send(_: Message) -> None:
            nonlocal count
            count += 1
            if count > 10:  # its window is full
                await asyncio.Event().wait()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        scope = {"type": "http", "asgi": {"spec_version": version}, "method": "POST", "headers": []}
        await sse.EventStream(b"data: 0\n\n", events())(scope, receive, send)
        return count

    assert asyncio.run(asyncio.wait_for(serve(), 10)) == 11
    assert closed == [True]
