"""``/v1/responses`` through OpenAI's client, which checks every response and event against its types."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from pydantic import BaseModel, Field
from smelt.runtime import SamplingParams
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.model.deltas import Delta
from smelt.runtime.serve.openai.responses.responses import text_logprobs
from smelt.runtime.serve.openai.token_text import TokenText

from ...serving import TEMPLATE, Serving, served, serving

ASKED: dict[str, Any] = {
    "model": "smelt-6m",
    "instructions": "Be short.",
    "input": "Where is London?",
    "max_output_tokens": 16,
    "temperature": 0,
}
PROMPT = "<|system|>Be short.<|end|><|user|>Where is London?<|end|><|assistant|>"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": None,
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME: dict[str, Any] = {"type": "function", "name": "now", "description": None, "parameters": None, "strict": None}
# The same, with reasoning before an answer.
THINKING = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}",
)
# What a model that thinks, speaks and calls would write.
EVERYTHING = (
    r"<think>\nhm, London\n</think>\n\nHello!\n"
    r'<tool_call>\n\{"name": "now", "arguments": \{"zone": "[A-Z]{3}"\}\}\n</tool_call>'
)


def _client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


@pytest.fixture
def client(server: Serving) -> openai.OpenAI:
    return _client(server)


@pytest.fixture
def thinking(engine: Engine) -> Iterator[Serving]:
    with serving([served(engine, template=THINKING)]) as found:
        yield found


def _message(response: Response) -> ResponseOutputMessage:
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    return message


def _text(response: Response) -> ResponseOutputText:
    (text,) = _message(response).content
    assert isinstance(text, ResponseOutputText)
    return text


def _checked(events: list[ResponseStreamEvent]) -> Response:
    """The response at the end of a stream whose events fit together."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert last.type in ("response.completed", "response.incomplete", "response.failed")
    assert f"response.{last.response.status}" == last.type
    assert first.response.id == last.response.id
    assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)
    grown: dict[int, str] = {}
    done: dict[int, Any] = {}
    for event in events[2:-1]:
        # An item's events end before the next one's begin.
        assert event.output_index == len(grown) - (event.type != "response.output_item.added")  # type: ignore[union-attr]
        match event.type:
            case "response.output_item.added":
                assert len(done) == len(grown)
                grown[event.output_index] = ""
                assert event.item.status == "in_progress"  # type: ignore[union-attr]
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                assert event.delta
                grown[event.output_index] += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == grown[event.output_index]
            case "response.function_call_arguments.done":
                assert event.arguments == grown[event.output_index]
            case "response.output_item.done":
                done[event.output_index] = event.item
            case "response.content_part.done":
                assert event.part.text == grown[event.output_index]  # type: ignore[union-attr]
            case kind:
                assert kind == "response.content_part.added"
    if last.response.status != "failed":
        assert list(done.values()) == last.response.output
    return last.response


def _without_names(response: Response) -> dict[str, Any]:
    """What two runs of one request have in common."""
    found = response.model_dump(exclude={"id", "created_at", "completed_at", "usage"})
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
    return found


def test_an_answer_continues_what_the_template_writes(client: openai.OpenAI, engine: Engine) -> None:
    wanted = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))[0]
    found = client.responses.create(**ASKED)
    assert found.output_text == wanted.outputs[0].text
    assert found.usage is not None
    assert found.usage.input_tokens == len(wanted.prompt_token_ids)
    assert found.usage.output_tokens == 16
    assert found.usage.total_tokens == found.usage.input_tokens + 16
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    streamed = _checked(list(client.responses.create(**ASKED, stream=True)))
    for found in (whole, streamed):
        assert found.status == "incomplete"
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.completed_at is None
        assert _message(found).status == "incomplete"
    assert _without_names(streamed) == _without_names(whole)


def test_a_stream_says_the_same_in_pieces(client: openai.OpenAI) -> None:
    asked = {**ASKED, "extra_body": {"structured_outputs": {"regex": "[a-z]{3} [a-z]{3}, and so on[.]"}}}
    whole = client.responses.create(**asked, stream=False)
    assert whole.status == "completed"
    assert whole.completed_at is not None
    assert whole.completed_at >= whole.created_at
    assert _message(whole).status == "completed"
    streamed = _checked(list(client.responses.create(**asked, stream=True)))
    assert _without_names(streamed) == _without_names(whole)
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_events_have_names_and_nothing_follows_the_last(server: Serving) -> None:
    found = httpx2.post(f"{server.url}/v1/responses", json={**ASKED, "stream": True})
    assert found.headers["content-type"].startswith("text/event-stream")
    *events, end = found.text.split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1].startswith("event: response.incomplete\n")


def test_fields_come_back(client: openai.OpenAI) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    found = client.responses.create(
        **ASKED,
        top_p=0.5,
        tools=[WEATHER, TIME],
        tool_choice=choice,  # type: ignore[arg-type]
        parallel_tool_calls=False,
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
        # Accepted, and not used.
        store=True,
        include=["reasoning.encrypted_content"],
        truncation="auto",
        background=False,
        service_tier="auto",
        safety_identifier="me",
        prompt_cache_key="key",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "implicit"},
        max_tool_calls=3,
        context_management=[{"type": "compaction"}],
        extra_body={"user": "me", "moderation": {"model": "m"}, "stream_options": {"include_obfuscation": False}},
    )
    assert found.model == "smelt-6m"
    assert found.instructions == "Be short."
    assert (found.temperature, found.top_p, found.max_output_tokens) == (0, 0.5, 16)
    assert [tool.model_dump(include=set(WEATHER)) for tool in found.tools] == [WEATHER, TIME]
    assert found.tool_choice.model_dump() == choice  # type: ignore[union-attr]
    assert not found.parallel_tool_calls
    assert found.metadata == {"a": "b"}
    assert found.reasoning is not None
    assert found.reasoning.effort == "low"
    assert found.text is not None
    assert found.text.verbosity == "low"
    assert (found.user, found.safety_identifier, found.prompt_cache_key) == ("me", "me", "key")
    assert found.model_dump()["store"] is False
    assert (found.background, found.truncation, found.previous_response_id) == (False, "auto", None)


def test_the_oldest_turns_are_left_out_if_asked(client: openai.OpenAI, engine: Engine) -> None:
    """As many as do not fit: with one more the prompt would be too long. Calls go with the turn that asked for them."""

    def turn(number: int) -> list[Any]:
        call = {"type": "function_call", "call_id": f"c{number}", "name": "now", "arguments": "{}"}
        return [
            {"role": "user", "content": f"Question {number}. " + "The river ran. " * 20},
            call,
            {"type": "function_call_output", "call_id": f"c{number}", "output": "12:00"},
            {"role": "assistant", "content": f"Answer {number}."},
        ]

    last = {"role": "user", "content": "And now?"}
    many = [item for number in range(engine.max_model_len // 40) for item in turn(number)]
    asked: dict[str, Any] = {"model": "smelt-6m", "temperature": 0, "max_output_tokens": 8, "instructions": "Be short."}
    found = client.responses.create(input=[*many, last], truncation="auto", **asked)
    assert found.usage is not None
    for start in range(4, len(many), 4):
        try:
            alone = client.responses.create(input=[*many[start:], last], **asked)
        except openai.BadRequestError:
            continue
        break
    assert alone.usage is not None
    assert (found.output_text, found.usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(input=[*many, last], **asked)
    endless = {"role": "user", "content": "The river ran. " * engine.max_model_len}
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(input=[*many, endless], truncation="auto", **asked)


@pytest.mark.slow
def test_json_follows_its_schema(client: openai.OpenAI) -> None:
    class City(BaseModel):
        name: str = Field(max_length=10)
        people: int = Field(ge=0, le=9999)

    asked = {**ASKED, "max_output_tokens": 200, "temperature": 1}
    for seed in range(3):
        found = client.responses.parse(**asked, text_format=City, extra_body={"seed": seed})
        assert found.status == "completed"
        assert found.output_parsed == City.model_validate_json(found.output_text)
        assert found.text is not None
        assert found.text.format is not None
        assert found.text.format.type == "json_schema"
        with client.responses.stream(**asked, text_format=City, extra_body={"seed": seed}) as stream:
            assert stream.get_final_response().output_parsed == found.output_parsed


@pytest.mark.slow
def test_a_required_call_has_arguments_of_its_schema(client: openai.OpenAI) -> None:
    asked = {
        **ASKED, "tools": [WEATHER, TIME], "max_output_tokens": 200, "temperature": 1.0, "parallel_tool_calls": False,
    }  # fmt: skip
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    for choice in ("required", {"type": "function", "name": "get_weather"}, allowed):
        for stream in (False, True):
            answer = client.responses.create(**asked, tool_choice=choice, stream=stream, extra_body={"seed": 5})
            found = answer if isinstance(answer, Response) else _checked(list(answer))
            assert found.status == "completed"
            (call,) = found.output
            assert isinstance(call, ResponseFunctionToolCall)
            assert call.status == "completed"
            assert call.call_id.startswith("call_")
            if choice != "required":
                assert call.name == "get_weather"
            if call.name == "get_weather":
                jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])
            else:
                assert json.loads(call.arguments) == {}


def test_a_call_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "minLength": 500}}, "required": ["text"]}
    asked = {
        **ASKED, "tools": [{**WEATHER, "parameters": parameters}], "tool_choice": "required", "max_output_tokens": 60,
    }  # fmt: skip
    found = _checked(list(client.responses.create(**asked, stream=True)))
    assert found.status == "incomplete"
    (call,) = found.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.status == "incomplete"


def test_reasoning_text_and_calls_are_items(thinking: Serving) -> None:
    client = _client(thinking)
    asked = {
        **ASKED, "tools": [WEATHER, TIME], "max_output_tokens": 200,
        "extra_body": {"structured_outputs": {"regex": EVERYTHING}},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    streamed = _checked(list(client.responses.create(**asked, stream=True)))
    assert _without_names(streamed) == _without_names(whole)
    assert whole.status == "completed"
    thought, message, call = whole.output
    assert isinstance(thought, ResponseReasoningItem)
    assert [part.text for part in thought.content or ()] == ["hm, London"]
    assert isinstance(message, ResponseOutputMessage)
    assert whole.output_text == "Hello!"
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments).keys()) == ("now", {"zone"})
    model = next(iter(thinking.models))
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len(model.encode("hm, London"))

    # Clients send all of it back.
    history = [
        {"role": "user", "content": "Where is London?"},
        *(item.model_dump() for item in whole.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    second = client.responses.create(**{**ASKED, "input": history, "tools": [WEATHER, TIME]})
    nested = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}
        for tool in (WEATHER, TIME)
    ]
    function = {"name": "now", "arguments": call.arguments}
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where is London?"},
        {
            "role": "assistant", "content": "Hello!", "reasoning_content": "hm, London",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
    ]  # fmt: skip
    same = httpx2.post(f"{thinking.url}/tokenize", json={"messages": chat, "tools": nested}).json()
    assert second.usage is not None
    assert second.usage.input_tokens == same["count"]
    text = model.decode(same["tokens"], skip_special_tokens=False)
    assert "<think>\nhm, London\n</think>\n\nHello!<tool_call>" in text


def test_reasoning_that_is_cut_off_is_incomplete(thinking: Serving) -> None:
    asked = {**ASKED, "extra_body": {"structured_outputs": {"regex": "<think>\\n[a-z ]{200}"}}, "max_output_tokens": 30}
    found = _checked(list(_client(thinking).responses.create(**asked, stream=True)))
    assert found.status == "incomplete"
    (thought,) = found.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.status == "incomplete"
    assert found.usage is not None
    assert 0 < found.usage.output_tokens_details.reasoning_tokens <= 30


def test_log_probabilities_are_those_of_chats(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where is London?"},
    ]
    chat = client.chat.completions.create(
        model="smelt-6m", messages=messages, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    wanted = [each.model_dump() for each in chat.choices[0].logprobs.content or ()]
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    for found in (whole, _checked(events)):
        assert found.top_logprobs == 2
        assert [each.model_dump() for each in _text(found).logprobs or ()] == wanted
    pieces = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [each.token for each in itertools.chain(*pieces)] == [each["token"] for each in wanted]
    assert _text(client.responses.create(**ASKED)).logprobs == []


def test_the_token_that_ends_a_text_has_no_log_probability(client: openai.OpenAI, server: Serving) -> None:
    # It could go on with a character that the model does not write.
    structured = {"structured_outputs": {"regex": "yes(§)?"}}
    found = client.responses.create(**ASKED, include=["message.output_text.logprobs"], extra_body=structured)
    assert "".join(each.token for each in _text(found).logprobs or ()) == found.output_text == "yes"
    assert found.usage is not None
    assert found.usage.output_tokens == len(_text(found).logprobs or ()) + 1
    # A slow reader gets the end together with the text.
    model = next(iter(server.models))
    tokens = [*model.encode("yes"), 0]
    logprobs = [{token: -1.0} for token in tokens]
    for stop_reason, missing in ((0, 1), ("s", 0), (None, 0)):
        delta = Delta(0, "yes", tokens, logprobs, "stop", stop_reason)
        assert len(text_logprobs(delta, TokenText(model), 0)) == len(tokens) - missing


def test_an_engine_that_fails_ends_a_stream_with_that(
    client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, left = engine.core._collect, itertools.count(40, -1)

    def collect_until_it_fails() -> Any:
        if next(left) <= 0:
            raise RuntimeError
        return collect()

    asked = {**ASKED, "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    with monkeypatch.context() as changed:
        changed.setattr(engine.core, "_collect", collect_until_it_fails)
        events = list(client.responses.create(**asked, stream=True))
        with pytest.raises(openai.InternalServerError, match="engine failed"):
            client.responses.create(**asked)
    found = _checked(events)
    assert found.status == "failed"
    assert found.error is not None
    assert found.error.code == "server_error"
    assert "engine failed" in found.error.message
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert found.output_text == said
    assert all(isinstance(item, ResponseOutputMessage) and item.status == "incomplete" for item in found.output)
    assert client.responses.create(**ASKED).status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_value"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "unsupported_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "unsupported_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_value"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "unsupported_value"),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", None),
        (
            {
                "tools": [TIME],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice",
            None,
        ),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"text": {"form": {}}}, "text.form", "unknown_parameter"),
        ({"input": None}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"role": "tool", "content": ""}]}, "input.0.role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing_required_parameter"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input.0.call_id", "missing_required_parameter"),
        ({"input": ["hi"]}, "input.0", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "missing_required_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing_required_parameter"),
        ({"input": "word " * 1100}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 1020}, "input", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, code: str | None, server: Serving) -> None:
    for stream in (False, True):
        found = httpx2.post(f"{server.url}/v1/responses", json={**ASKED, **fields, "stream": stream})
        error = found.json()["error"]
        assert (found.status_code, error["param"], error["code"]) == (400, param, code), error
        assert error["type"] == "invalid_request_error"


def test_halves_of_characters_are_refused(server: Serving) -> None:
    """Python's JSON reads them, but no response could contain them."""
    for stream in (b"false", b"true"):
        body = b'{"input": "hi", "metadata": {"a": "\\ud800"}, "max_output_tokens": 3, "stream": %s}' % stream
        headers = {"content-type": "application/json"}
        found = httpx2.post(f"{server.url}/v1/responses", content=body, headers=headers)
        assert found.status_code == 400
        assert "surrogates not allowed" in found.json()["error"]["message"]


def test_a_model_that_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as problem:
        client.responses.create(**{**ASKED, "model": "other"})
    assert problem.value.code == "model_not_found"
