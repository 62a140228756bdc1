"""Inputs of ``/v1/responses`` as conversations, by the API's documentation."""

from __future__ import annotations

from typing import Any

import pytest
from smelt.runtime.serve.http.errors import ApiError
from smelt.runtime.serve.model.chat_prompt import NamedFunction, NamedTool
from smelt.runtime.serve.openai.responses.conversation import options_of, turns_of
from smelt.runtime.serve.openai.responses.fields import ResponsesRequest

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TIME: dict[str, Any] = {"type": "function", "name": "now", "parameters": None}
CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
SECOND = {"type": "function_call", "call_id": "call_2", "name": "now", "arguments": ""}
SECOND_CALLED = {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": {}}}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def _request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "hi", **fields})


def _turns(*items: Any) -> list[dict[str, Any]]:
    return turns_of(_request(input=list(items)))


def test_a_text_is_a_users_message_after_the_instructions() -> None:
    assert turns_of(_request(instructions="Be short.")) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]


def test_messages_have_texts_or_parts() -> None:
    assert _turns(
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "hi", "type": "message"},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": None,
            "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "No."},
    ]


def test_calls_belong_to_the_message_before_them() -> None:
    user, message = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "I will look."}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    parts = {**output, "call_id": "call_2", "output": [{"type": "input_text", "text": "noon"}], "status": "completed"}
    assert _turns(user, message, CALL, SECOND, output, parts) == [
        user,
        {**message, "tool_calls": [CALLED, SECOND_CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "name": "now", "content": "noon"},
    ]
    assert _turns(user, CALL, output, SECOND) == [
        user,
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "rain"},
        {"role": "assistant", "content": "", "tool_calls": [SECOND_CALLED]},
    ]


def test_reasoning_belongs_to_what_follows_it() -> None:
    user, message = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}
    assert _turns(user, THOUGHT, message, user) == [user, {**message, "reasoning_content": "Hm."}, user]
    assert _turns(user, THOUGHT, CALL) == [
        user,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALLED]},
    ]
    assert _turns(user, THOUGHT, message, CALL) == [
        user,
        {**message, "reasoning_content": "Hm.", "tool_calls": [CALLED]},
    ]
    # It was cut off.
    assert _turns(user, THOUGHT, user) == [
        user,
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        user,
    ]
    encrypted = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"}
    assert _turns(user, encrypted, message) == [user, message]


@pytest.mark.parametrize("arguments", ['{"city": ', "[" * 100_000, "1" * 10_000, ""])
def test_a_call_comes_back_as_it_was_written(arguments: str) -> None:
    """A model may err, and max_tokens may cut it; a tool's complaint follows."""
    output = {"type": "function_call_output", "call_id": "call_1", "output": "no JSON"}
    turns = _turns({"role": "user", "content": "hi"}, {**CALL, "arguments": arguments}, output)
    assert turns[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": arguments or {}}
    assert turns[2]["content"] == "no JSON"


@pytest.mark.parametrize(
    ("item", "param", "says"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[1]", "stored"),
        ({"id": "msg_1"}, "input[1]", "stored"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[1]", "'web_search_call'"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[1].content[0]", "text only"),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_file", "file_id": "x"}]},
            "input[1].content[1]",
            "text only",
        ),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text", "no text"),
        (
            {"type": "function_call_output", "call_id": "call_9", "output": ""},
            "input[1].call_id",
            "No tool call found for function call output with call_id call_9",
        ),
    ],
)
def test_what_is_refused_is_named(item: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as problem:
        _turns({"role": "user", "content": "hi"}, item)
    assert problem.value.status == 400
    assert problem.value.param == param
    assert says in str(problem.value)


def test_flat_tools_are_nested() -> None:
    options = options_of(_request(tools=[WEATHER, TIME], parallel_tool_calls=False))
    assert [tool.model_dump(exclude_none=True) for tool in options.tools] == [
        {"type": "function", "function": {key: value for key, value in WEATHER.items() if key != "type"}},
        {"type": "function", "function": {"name": "now"}},
    ]
    assert options.choice is None
    assert not options.is_parallel
    assert options_of(_request()).is_parallel


@pytest.mark.parametrize(
    ("given", "choice", "names"),
    [
        (None, None, ["get_weather", "now"]),
        ("auto", "auto", ["get_weather", "now"]),
        ("none", "none", ["get_weather", "now"]),
        ("required", "required", ["get_weather", "now"]),
        ({"type": "function", "name": "now"}, NamedTool(function=NamedFunction(name="now")), ["get_weather", "now"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            "required",
            ["now"],
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, "auto", ["now"]),
    ],
)
def test_choices(given: Any, choice: Any, names: list[str]) -> None:
    options = options_of(_request(tools=[WEATHER, TIME], tool_choice=given))
    assert options.choice == choice
    assert [tool.function.name for tool in options.tools] == names


def test_a_flat_format_is_nested() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "numbers", "schema": schema, "strict": True}
    found = options_of(_request(text={"format": form, "verbosity": "low"})).form
    assert found is not None
    # As chats have it.
    assert found.model_dump(by_alias=True, exclude_none=True) == {
        "type": "json_schema",
        "json_schema": {"name": "numbers", "schema": schema, "strict": True},
    }
    found = options_of(_request(text={"format": {"type": "json_object"}})).form
    assert found is not None
    assert found.model_dump(exclude_none=True) == {"type": "json_object"}
    assert options_of(_request(text={"verbosity": "low"})).form is None


def test_the_effort_of_reasoning_is_the_templates() -> None:
    found = options_of(_request(reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"a": 1}))
    assert found.template == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}
    said = {"enable_thinking": True}
    assert options_of(_request(reasoning={"effort": "none"})).template["enable_thinking"] is False
    assert options_of(_request(reasoning={"effort": "none"}, chat_template_kwargs=said)).template["enable_thinking"]
    assert options_of(_request(reasoning={"effort": None})).template == {}
