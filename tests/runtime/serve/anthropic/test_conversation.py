"""The Messages API's conversations as chat templates need them, against examples of its documentation."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from smelt.runtime.serve.anthropic.conversation import options_of, turns_of
from smelt.runtime.serve.anthropic.fields import ConversationRequest
from smelt.runtime.serve.anthropic.messages import MessagesRequest
from smelt.runtime.serve.http.errors import ApiError
from smelt.runtime.serve.model.chat_prompt import ChatOptions, NamedTool

HELLO = {"role": "user", "content": "Hello"}
ID = "toolu_01A09q90qw90lq917835lq9"
CALL = {"type": "tool_use", "id": ID, "name": "get_weather", "input": {"location": "San Francisco, CA"}}
CALLED = {
    "id": ID,
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"location": "San Francisco, CA"}},
}
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}


def _request(*messages: dict[str, Any], **fields: Any) -> ConversationRequest:
    return ConversationRequest.model_validate({"model": "m", "messages": list(messages), **fields})


def _turns(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return turns_of(_request(*messages, **fields))


def _options(**fields: Any) -> ChatOptions:
    request = _request(HELLO, **fields)
    request.check()
    return options_of(request, turns_of(request))


def _text(text: str, **marks: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **marks}


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_a_string_is_a_block_of_text() -> None:
    assert _turns(HELLO) == _turns(_user(_text("Hello"))) == [HELLO]


def test_the_system_prompt_comes_first() -> None:
    assert _turns(HELLO, system="Be short.") == [{"role": "system", "content": "Be short."}, HELLO]
    blocks = [
        _text("x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"),
        _text("Be short.", cache_control={"type": "ephemeral"}),
        _text("Be kind."),
    ]
    assert _turns(HELLO, system=blocks) == [{"role": "system", "content": "Be short.\nBe kind."}, HELLO]
    for nothing in ([], "", [_text("")]):
        assert _turns(HELLO, system=nothing) == [HELLO]


def test_system_messages_join_the_system_prompt() -> None:
    found = _turns(
        HELLO, {"role": "system", "content": "It is noon."}, {"role": "user", "content": "Now?"}, system="Be short."
    )
    assert found == [
        {"role": "system", "content": "Be short.\nIt is noon."},
        {"role": "user", "content": "Hello\nNow?"},
    ]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    answer = {"role": "assistant", "content": "Hi"}
    assert _turns(HELLO, {"role": "user", "content": "there"}, answer, answer, HELLO) == [
        {"role": "user", "content": "Hello\nthere"},
        {"role": "assistant", "content": "Hi\nHi"},
        HELLO,
    ]


def test_a_call_and_its_result() -> None:
    found = _turns(
        {"role": "user", "content": "What's the weather like in San Francisco?"},
        _assistant(_text("I'll check the current weather in San Francisco for you."), CALL),
        _user({"type": "tool_result", "tool_use_id": ID, "content": "15 degrees"}),
    )
    assert found == [
        {"role": "user", "content": "What's the weather like in San Francisco?"},
        {
            "role": "assistant",
            "content": "I'll check the current weather in San Francisco for you.",
            "tool_calls": [CALLED],
        },
        {"role": "tool", "tool_call_id": ID, "name": "get_weather", "content": "15 degrees"},
    ]


def test_results_come_before_what_the_user_says() -> None:
    other = {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [_text("12:00"), _text("UTC")]},
        {"type": "tool_result", "tool_use_id": ID, "is_error": True},
    ]
    found = _turns(HELLO, _assistant(CALL, other), _user(_text("Here:")), _user(*results, _text("What next?")))
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALLED, {"id": "toolu_2", "type": "function", "function": {"name": "now", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "toolu_2", "name": "now", "content": "12:00\nUTC"},
        {"role": "tool", "tool_call_id": ID, "name": "get_weather", "content": "Error"},
        {"role": "user", "content": "Here:\nWhat next?"},
    ]


def test_reasoning_comes_back() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}
    redacted = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix/LafPsn4a"}
    assert _turns(HELLO, _assistant(thinking, redacted, _text("Hi")), HELLO) == [
        HELLO,
        {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},
        HELLO,
    ]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (
            [_user({"type": "image", "source": {"type": "url", "url": "x"}})],
            "messages.0.content.0 .*'image'.*text only",
        ),
        ([_user(_text("a"), {"type": "document", "source": {}})], "messages.0.content.1 .*'document'"),
        ([_user({"type": "search_result", "content": []})], "'search_result'"),
        ([HELLO, _assistant({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}})], "messages.1"),
        (
            [_user({"type": "tool_result", "tool_use_id": "a", "content": [_text("a"), {"type": "image"}]})],
            "messages.0.content.0.content.1 .*'image'",
        ),
        ([_user(CALL)], "'tool_use'.*role 'user'"),
        ([HELLO, _assistant({"type": "tool_result", "tool_use_id": "a"})], "'tool_result'.*role 'assistant'"),
        ([_user({"type": "thinking", "thinking": "Hm."})], "'thinking'.*role 'user'"),
        ([HELLO, {"role": "system", "content": [CALL]}], "messages.1.content.0 .*'tool_use'"),
    ],
)
def test_blocks_that_do_not_belong_are_refused(messages: list[dict[str, Any]], where: str) -> None:
    with pytest.raises(ApiError, match=where) as caught:
        _turns(*messages)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text"},
        {"type": "tool_use", "id": "a", "name": "b"},
        {"type": "tool_use", "id": "a", "name": "b", "input": "{}"},
        {"type": "tool_result"},
        {"text": "a"},
        "a",
        None,
    ],
)
def test_malformed_blocks_are_refused(block: Any) -> None:
    with pytest.raises(ValidationError, match="messages"):
        _request({"role": "user", "content": [block]})


def test_the_last_answer_is_continued() -> None:
    request = _request(
        {"role": "user", "content": "What's the Greek name for Sun? (A) Sol (B) Helios (C) Sun"},
        {"role": "assistant", "content": "The best answer is ("},
    )
    turns = turns_of(request)
    assert turns[-1] == {"role": "assistant", "content": "The best answer is ("}
    assert options_of(request, turns).continue_last
    assert not _options().continue_last


def test_an_empty_last_answer_is_no_prefill() -> None:
    for content in ("", []):
        request = _request(HELLO, {"role": "assistant", "content": content})
        turns = turns_of(request)
        assert turns == [HELLO]
        assert not options_of(request, turns).continue_last


def test_a_call_without_a_result_cannot_be_continued() -> None:
    request = _request(HELLO, _assistant(CALL))
    with pytest.raises(ApiError, match="tool_result"):
        options_of(request, turns_of(request))


def test_tools() -> None:
    (tool,) = _options(tools=[{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}}]).tools
    assert tool.model_dump(exclude_none=True) == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a given location",
            "parameters": WEATHER["input_schema"],
        },
    }


@pytest.mark.parametrize("type", ["bash_20250124", "web_search_20250305", "computer_20250124", "mcp_toolset"])
def test_tools_of_the_vendor_are_refused(type: str) -> None:
    with pytest.raises(ApiError, match=f"tools.1 .*{type}"):
        _options(tools=[WEATHER, {"type": type, "name": "x"}])


def test_tool_choices() -> None:
    assert _options(tools=[WEATHER]).choice is None
    for given, wanted in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert _options(tools=[WEATHER], tool_choice={"type": given}).choice == wanted
    named = _options(tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}).choice
    assert isinstance(named, NamedTool)
    assert named.function.name == "get_weather"
    for disabled, parallel in ((True, False), (False, True)):
        choice = {"type": "any", "disable_parallel_tool_use": disabled}
        assert _options(tools=[WEATHER], tool_choice=choice).is_parallel is parallel
    assert _options(tools=[WEATHER], tool_choice={"type": "any"}).is_parallel


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        (None, {}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True, "thinking": True}),
        ({"type": "adaptive", "display": "summarized"}, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({"type": "between_tools"}, {}),
    ],
)
def test_thinking_is_the_templates_matter(thinking: dict[str, Any] | None, wanted: dict[str, Any]) -> None:
    assert _options(thinking=thinking).template == wanted


def test_output_config() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = _options(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert found.template == {"reasoning_effort": "low"}
    assert found.form is not None
    assert found.form.json_schema is not None
    assert found.form.json_schema.json_schema == schema
    assert _options(output_config={}).form is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}]}, "mcp_servers"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "any", "name": "get_weather"}}, "name"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000}, "greater than"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], says: str) -> None:
    request = MessagesRequest.model_validate({"model": "m", "messages": [HELLO], "max_tokens": 4096, **fields})
    with pytest.raises(ApiError, match=says):
        request.check()


@pytest.mark.parametrize(
    "field",
    ["cache_control", "container", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier",
     "speed", "mcp_servers", "system", "tools", "tool_choice", "thinking", "output_config"],
)  # fmt: skip
def test_null_is_as_good_as_nothing(field: str) -> None:
    request = _request(HELLO, **{field: None})
    request.check()
    assert turns_of(request) == [HELLO]
