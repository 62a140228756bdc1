"""``/v1/messages/count_tokens`` against what the same requests use."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest
from smelt.runtime.engine.engine import Engine

from ..serving import Serving

USER: dict[str, Any] = {"role": "user", "content": "Where is London?"}
NOW: dict[str, Any] = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}
CALLED: list[Any] = [
    USER,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}]},
]


@pytest.fixture
def client(server: Serving) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True)


def test_the_count_is_that_of_the_templates_text(client: anthropic.Anthropic, engine: Engine) -> None:
    found = client.messages.count_tokens(model="smelt-6m", system="Be short.", messages=[USER])  # type: ignore[list-item]
    text = "<|system|>Be short.<|end|><|user|>Where is London?<|end|><|assistant|>"
    assert found.input_tokens == len(engine.tokenizer(text).input_ids)


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [USER]},
        {"messages": [USER], "system": [{"type": "text", "text": "Be short."}]},
        {"messages": [USER], "tools": [NOW]},
        {"messages": [USER], "tools": [NOW], "tool_choice": {"type": "tool", "name": "now"}},
        {"messages": [USER], "tools": [NOW], "tool_choice": {"type": "none"}},
        {"messages": CALLED, "tools": [NOW]},
        {"messages": [USER, {"role": "assistant", "content": "It is in"}]},
        {"messages": [USER], "thinking": {"type": "adaptive"}},
    ],
    ids=["plain", "system", "tools", "named tool", "no tool", "result", "prefill", "thinking"],
)
def test_the_count_is_that_of_the_request_itself(asked: dict[str, Any], client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="smelt-6m", **asked).input_tokens
    used = client.messages.create(model="smelt-6m", max_tokens=1, **asked).usage
    assert count == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_tools_count(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "smelt-6m", "messages": [USER]}
    plain = client.messages.count_tokens(**asked).input_tokens
    assert client.messages.count_tokens(**asked, tools=[NOW]).input_tokens > plain
    assert client.messages.count_tokens(**asked, tools=[NOW], tool_choice={"type": "none"}).input_tokens == plain


def test_what_is_refused_there_is_refused_here(client: anthropic.Anthropic, server: Serving) -> None:
    with pytest.raises(anthropic.BadRequestError, match="takes text only"):
        client.messages.count_tokens(
            model="smelt-6m",
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "https://example.org"}}],
                }
            ],
        )
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=[{"role": "user", "content": "a"}])
    found = httpx2.post(
        f"{server.url}/v1/messages/count_tokens", json={"model": "smelt-6m", "messages": [USER], "n": 1}
    )
    assert found.status_code == 400
    assert found.json()["error"]["type"] == "invalid_request_error"
