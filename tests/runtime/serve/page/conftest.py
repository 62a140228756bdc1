"""A browser with the live page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from smelt.runtime.engine.engine import Engine

from ..serving import TEMPLATE, Serving, served, serving
from .shown import CONTINUES, Opened


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """``opened(server, width=…)`` shows a server's page; whatever the page complains of or asks others for fails the test."""
    troubles: list[str] = []
    elsewhere: list[str] = []
    contexts = []

    def show(server: Serving, width: int = 1280, expects: str = "", **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        shown = contexts[-1].new_page()

        def complain(message: Any) -> None:
            # The browser writes a line for each response that is an error.
            is_expected = expects and expects in message.text
            if message.type in ("error", "warning") and not is_expected:
                troubles.append(message.text)

        shown.on("console", complain)
        shown.on("pageerror", lambda error: troubles.append(str(error)))
        shown.on("dialog", lambda dialog: (troubles.append(f"dialog {dialog.message}"), dialog.dismiss()))
        shown.on("request", lambda asked: None if asked.url.startswith(server.url) else elsewhere.append(asked.url))
        shown.goto(server.url)
        return shown

    yield show
    for context in contexts:
        context.close()
    assert not troubles
    assert not elsewhere


@pytest.fixture(scope="module")
def pair(engine: Engine) -> Iterator[Serving]:
    """Two models that continue a conversation as a text. The second is shown a line more, and answers differ by it."""
    models = [served(engine, "dry", template=CONTINUES), served(engine, "rainy", template=f"\n{CONTINUES}")]
    engine.tokenizer.chat_template = TEMPLATE
    with serving(models) as found:
        yield found


@pytest.fixture
def slowly(engine: Engine) -> Iterator[None]:
    """Every step takes a while longer."""
    engine.core.on_step = lambda _: time.sleep(0.03)
    yield
    engine.core.on_step = None
