"""What tests do on the live page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from ....tiny import REPOSITORY
from ..serving import Serving

FOLDER = REPOSITORY / "runtime" / "serve" / "page"
# smelt-6m has learnt stories, and no conversations.
CONTINUES = "{% for message in messages %}{{ message.content }}{% endfor %}"
Opened = Callable[..., Any]


def say(shown: Any, text: str, *, first: str | None = None, second: str | None = None, tokens: int = 32) -> None:
    shown.locator("#first option").first.wait_for(state="attached")
    if first is not None:
        shown.get_by_label("Model", exact=True).select_option(first)
    if second is not None:
        shown.get_by_label("Compare with").select_option(second)
    shown.get_by_label("Max tokens").fill(str(tokens))
    shown.get_by_label("Message", exact=True).fill(text)
    shown.get_by_role("button", name="Send").click()


def ended(shown: Any, count: int = 1) -> None:
    """So many answers are there, and none grows any more."""
    shown.wait_for_function(
        "count => document.querySelectorAll('.answer[aria-busy=false]').length === count"
        " && !document.querySelector('.answer[aria-busy=true]')",
        arg=count,
    )


def texts_of(shown: Any) -> list[str]:
    return shown.locator(".answer > .text").evaluate_all("all => all.map((one) => one.textContent)")


def figures(shown: Any) -> str:
    return shown.locator(".figures").inner_text().replace("\N{NO-BREAK SPACE}", " ")


def api(server: Serving, model: str, messages: list[dict[str, str]], tokens: int = 32) -> Mapping[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "logprobs": True}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
