"""``/v1/messages`` through Anthropic's client, which checks every response against its types."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import jsonschema
import pytest
from anthropic.types import Message
from pydantic import BaseModel
from smelt.runtime import SamplingParams
from smelt.runtime.engine.engine import Engine
from smelt.runtime.requests.output import Completion
from smelt.runtime.serve.http.config import ServerConfig

from ....tiny import SMELT_6M
from ..serving import TEMPLATE, Serving, served, serving

USER: dict[str, Any] = {"role": "user", "content": "Where is London?"}
ASKED: dict[str, Any] = {
    "model": "smelt-6m",
    "max_tokens": 16,
    "system": "Be short.",
    "messages": [USER],
    "extra_body": {"temperature": 0},
}
PROMPT = "<|system|>Be short.<|end|><|user|>Where is London?<|end|><|assistant|>"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NOW: dict[str, Any] = {
    "name": "now",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}
# In the form of Qwen 3's: it opens the reasoning.
THINKING = TEMPLATE + "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}"


def _client(server: Serving, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True, **options
    )


@pytest.fixture
def client(server: Serving) -> anthropic.Anthropic:
    return _client(server)


def _alone(engine: Engine, prompt: str, **params: Any) -> Completion:
    """What the engine itself says."""
    wanted = engine.generate(prompt, SamplingParams(temperature=0, **{"max_tokens": 16, **params}))[0]
    return wanted.outputs[0]


def _content(message: Message) -> list[dict[str, Any]]:
    """Its blocks without what is drawn anew each time."""
    return [block.model_dump(exclude={"id", "signature"}, exclude_none=True) for block in message.content]


def _streamed(client: anthropic.Anthropic, **asked: Any) -> Message:
    """What the client's helper makes of a stream."""
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def test_an_answer_continues_what_the_template_writes(client: anthropic.Anthropic, engine: Engine) -> None:
    found = client.messages.create(**ASKED)
    wanted = _alone(engine, PROMPT)
    assert _content(found) == [{"type": "text", "text": wanted.text}]
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
    assert found.id.startswith("msg_")
    assert found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0) == len(
        engine.tokenizer(PROMPT).input_ids
    )
    assert found.usage.output_tokens == 16


def test_a_stream_says_the_same_in_pieces(client: anthropic.Anthropic) -> None:
    whole, streamed = client.messages.create(**ASKED), _streamed(client, **ASKED)
    assert _content(streamed) == _content(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens + (streamed.usage.cache_read_input_tokens or 0) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )


def test_events_come_in_the_documented_order(server: Serving) -> None:
    body = {**ASKED, **ASKED["extra_body"], "stream": True}
    del body["extra_body"]
    names, types = [], []
    with httpx2.stream("POST", f"{server.url}/v1/messages", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                names.append(value)
            elif line:
                assert kind == "data"
                types.append(json.loads(value)["type"])
    assert names == types
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_first_event_has_the_prompts_usage(client: anthropic.Anthropic) -> None:
    first, *_, last, _ = client.messages.create(**ASKED, stream=True)
    assert first.type == "message_start"
    assert first.message.content == []
    assert first.message.stop_reason is None
    assert first.message.usage.output_tokens <= 16
    assert last.type == "message_delta"
    assert last.usage.output_tokens == 16
    assert last.usage.input_tokens == first.message.usage.input_tokens


def test_cached_tokens_are_not_input_tokens(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "Nobody else asks for this: " + "far away " * 60}]}
    count = client.messages.count_tokens(
        model="smelt-6m", system=asked["system"], messages=asked["messages"]
    ).input_tokens
    first = client.messages.create(**asked).usage
    assert first.input_tokens + (first.cache_read_input_tokens or 0) == count
    for again in (client.messages.create(**asked).usage, _streamed(client, **asked).usage):
        assert (again.cache_read_input_tokens or 0) > count / 2 > (first.cache_read_input_tokens or 0)
        assert again.input_tokens + (again.cache_read_input_tokens or 0) == count
        assert again.cache_creation_input_tokens == 0


def test_an_answer_that_ends_at_once_has_no_blocks(client: anthropic.Anthropic, engine: Engine) -> None:
    wanted = _alone(engine, "<|user|>Goodbye.<|end|><|assistant|>")
    assert (wanted.finish_reason, wanted.text) == ("stop", "")
    asked = {**ASKED, "system": "", "messages": [{"role": "user", "content": "Goodbye."}]}
    for found in (client.messages.create(**asked), _streamed(client, **asked)):
        assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
        assert found.content == []
        assert found.usage.output_tokens == len(wanted.token_ids)


def test_stop_sequences_are_named_and_left_out(client: anthropic.Anthropic, engine: Engine) -> None:
    text = _alone(engine, PROMPT).text or ""
    stop = text[10:14]
    asked = {**ASKED, "stop_sequences": ["\0never", stop]}
    for found in (client.messages.create(**asked), _streamed(client, **asked)):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
        assert _content(found) == [{"type": "text", "text": text[: text.index(stop)]}]


def test_the_last_answer_is_continued(client: anthropic.Anthropic, engine: Engine) -> None:
    asked = {**ASKED, "messages": [USER, {"role": "assistant", "content": "It is in the"}]}
    wanted = _alone(engine, f"{PROMPT}It is in the").text
    for found in (client.messages.create(**asked), _streamed(client, **asked)):
        assert _content(found) == [{"type": "text", "text": wanted}]


def test_no_tokens_only_fill_the_cache(client: anthropic.Anthropic) -> None:
    content = "Nobody has asked for this either: " + "long ago " * 60
    asked = {**ASKED, "messages": [{"role": "user", "content": content}], "max_tokens": 0}
    for found in (client.messages.create(**asked), _streamed(client, **asked)):
        assert found.content == []
        assert (found.stop_reason, found.usage.output_tokens) == ("max_tokens", 0)
    again = client.messages.create(**{**asked, "max_tokens": 1})
    assert (again.usage.cache_read_input_tokens or 0) > 60


def test_sampling_parameters_are_the_engines(client: anthropic.Anthropic, engine: Engine) -> None:
    """The most likely token alone is left by either."""
    wanted = [{"type": "text", "text": _alone(engine, PROMPT).text}]
    for change in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1, "top_k": 1}):
        assert _content(client.messages.create(**{**ASKED, "extra_body": change})) == wanted


def test_a_tool_must_be_called(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 200, "tools": [WEATHER, NOW]}
    schemas = {tool["name"]: tool["input_schema"] for tool in (WEATHER, NOW)}
    for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
        choice = {**choice, "disable_parallel_tool_use": True}
        whole = client.messages.create(**asked, tool_choice=choice)
        assert whole.stop_reason == "tool_use"
        (block,) = whole.content
        assert block.type == "tool_use"
        assert block.id.startswith("toolu_")
        assert block.name == choice.get("name", block.name)
        jsonschema.validate(block.input, schemas[block.name])
        assert _content(_streamed(client, **asked, tool_choice=choice)) == _content(whole)


def test_arguments_are_streamed_as_they_come(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 200, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}
    pieces = [
        event.delta.partial_json
        for event in client.messages.create(**asked, stream=True)
        if event.type == "content_block_delta" and event.index == 0 and event.delta.type == "input_json_delta"
    ]
    assert len(pieces) > 3
    jsonschema.validate(json.loads("".join(pieces)), WEATHER["input_schema"])


def test_a_call_that_is_cut_off_says_so(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 24}
    whole, streamed = client.messages.create(**asked), _streamed(client, **asked)
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert _content(whole) == _content(streamed)


def test_a_call_and_its_result_go_back(client: anthropic.Anthropic) -> None:
    """The content of an answer is the content of a message, as the client has it."""
    asked = {**ASKED, "max_tokens": 200, "tools": [NOW]}
    called = client.messages.create(
        **asked, tool_choice={"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    )
    (block,) = called.content
    assert block.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "noon"}]}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    found = client.messages.create(**{**asked, "messages": messages, "tool_choice": {"type": "none"}})
    assert {block.type for block in found.content} <= {"text"}
    assert found.usage.output_tokens > 0


def test_text_follows_a_schema(client: anthropic.Anthropic) -> None:
    class City(BaseModel):
        is_large: bool
        river: bool

    found = client.messages.parse(**{**ASKED, "max_tokens": 200}, output_format=City)
    assert found.stop_reason == "end_turn"
    assert isinstance(found.parsed_output, City)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    streamed = _streamed(client, **{**ASKED, "max_tokens": 200}, output_config=config)
    assert streamed.stop_reason == "end_turn"
    (block,) = _content(streamed)
    jsonschema.validate(json.loads(block["text"]), schema)


@pytest.fixture(scope="module")
def thinker(engine: Engine) -> Iterator[anthropic.Anthropic]:
    with serving([served(engine, template=THINKING)]) as found:
        yield _client(found)


def test_reasoning_is_a_block_of_its_own(thinker: anthropic.Anthropic, engine: Engine) -> None:
    """smelt-6m never ends its reasoning, so that it is the whole answer."""
    wanted = (_alone(engine, f"{PROMPT}<think>\n").text or "").strip("\r\n")
    asked = {**ASKED, "thinking": {"type": "adaptive"}}
    for found in (thinker.messages.create(**asked), _streamed(thinker, **asked)):
        assert _content(found) == [{"type": "thinking", "thinking": wanted}]
        assert found.content[0].type == "thinking"
        assert found.content[0].signature
    off = thinker.messages.create(**{**ASKED, "thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]


def test_reasoning_may_be_left_out(thinker: anthropic.Anthropic) -> None:
    asked = {**ASKED, "thinking": {"type": "adaptive", "display": "omitted"}}
    for found in (thinker.messages.create(**asked), _streamed(thinker, **asked)):
        assert _content(found) == [{"type": "thinking", "thinking": ""}]
        assert found.usage.output_tokens == 16


def test_reasoning_goes_back(thinker: anthropic.Anthropic) -> None:
    answer = thinker.messages.create(**{**ASKED, "thinking": {"type": "adaptive"}})
    messages: list[Any] = [USER, {"role": "assistant", "content": answer.content}, USER]
    assert thinker.messages.create(**{**ASKED, "messages": messages}).usage.output_tokens > 0


def _of_length(client: anthropic.Anthropic, wanted: int) -> list[Any]:
    """Messages of so many tokens."""
    words = 0
    while True:
        messages: list[Any] = [{"role": "user", "content": " the" * words}]
        count = client.messages.count_tokens(model="smelt-6m", messages=messages).input_tokens
        if count == wanted:
            return messages
        assert count < wanted
        words += max(1, (wanted - count) // 2)


def test_the_models_length_ends_an_answer(client: anthropic.Anthropic, engine: Engine) -> None:
    asked = {**ASKED, "messages": _of_length(client, engine.max_model_len - 2)}
    del asked["system"]
    for found in (client.messages.create(**asked), _streamed(client, **asked)):
        if found.usage.output_tokens == 2:
            assert found.stop_reason == "model_context_window_exceeded"
        else:
            assert found.stop_reason == "end_turn"
    exact = client.messages.create(**{**asked, "max_tokens": 1})
    assert (exact.stop_reason, exact.usage.output_tokens) == ("max_tokens", 1)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_recognize_a_prompt_that_is_too_long(stream: bool, client: anthropic.Anthropic, engine: Engine) -> None:
    messages: list[Any] = [{"role": "user", "content": "far away " * engine.max_model_len}]
    count = client.messages.count_tokens(model="smelt-6m", messages=messages).input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="smelt-6m", max_tokens=16, messages=messages, stream=stream)
    assert f"prompt is too long: {count} tokens > {engine.max_model_len - 1} maximum" in str(caught.value)


def test_a_deadline_ends_a_request(client: anthropic.Anthropic) -> None:
    late = {"temperature": 0, "deadline": 0.05}
    with pytest.raises(anthropic.APIStatusError) as raised:
        client.messages.create(**{**ASKED, "max_tokens": 900, "stop_sequences": ["never"], "extra_body": late})
    assert raised.value.status_code == 408
    assert raised.value.body["error"]["type"] == "timeout_error"  # type: ignore[index, call-overload]


def test_fields_for_the_vendors_services_change_nothing(client: anthropic.Anthropic) -> None:
    extra = {
        "temperature": 0,
        "cache_control": {"type": "ephemeral"},
        "container": "c",
        "context_management": {"edits": []},
        "diagnostics": {},
        "inference_geo": "eu",
        "mcp_servers": [],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "speed": "standard",
    }
    found = client.messages.create(
        **{**ASKED, "extra_body": extra}, extra_headers={"anthropic-beta": "x", "anthropic-version": "2023-06-01"}
    )
    assert _content(found) == _content(client.messages.create(**ASKED))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "takes text only"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "takes text only"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [NOW, NOW]}, "Two tools are named 'now'"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "then"}}, "'then'"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}}, "cannot be followed"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": [""]}, "not empty"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
    ({"best_of": 3}, "Unknown field 'best_of'"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said(change: dict[str, Any], says: str, stream: bool, server: Serving) -> None:
    body = {"model": "smelt-6m", "max_tokens": 16, "messages": [USER], "stream": stream, **change}
    found = httpx2.post(f"{server.url}/v1/messages", json=body)
    assert found.status_code == 400, found.text
    assert found.headers["content-type"] == "application/json"
    error = found.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"]
    assert error["request_id"] == found.headers["request-id"]


def test_a_model_that_is_not_served(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASKED, "model": "other"})
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == caught.value.request_id


def test_other_failures_have_the_clients_classes(engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(api_keys=("key",), max_requests=1, max_body_bytes=2000)) as found:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            _client(found).messages.create(**ASKED)
        assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]
        client = _client(found).with_options(api_key="key")
        assert client.messages.create(**ASKED).content
        with pytest.raises(anthropic.APIStatusError, match="request_too_large") as large:
            client.messages.create(**{**ASKED, "system": "a" * 3000})
        assert large.value.status_code == 413
        entered = found.server.gate.enter()
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(**ASKED)
        entered.close()
        found.server.gate.draining = True
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error") as draining:
            client.messages.create(**ASKED)
        assert draining.value.status_code == 503


def test_a_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    engine = Engine(SMELT_6M, dtype="float32", max_num_seqs=2, quiet=True)
    steps = 0

    def fail(_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise RuntimeError("the accelerator is gone")

    engine.core.on_step = fail
    with serving([served(engine)]) as found:
        client = _client(found)
        seen: list[str] = []
        with pytest.raises(anthropic.APIStatusError, match="the engine failed") as caught:
            seen.extend(event.type for event in client.messages.create(**ASKED, stream=True))
        assert seen[0] == "message_start"
        assert "message_stop" not in seen
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "api_error"
        engine.core.on_step = None
        assert client.messages.create(**ASKED).content


def test_a_client_that_leaves_ends_its_request(client: anthropic.Anthropic, server: Serving, engine: Engine) -> None:
    with client.messages.stream(**{**ASKED, "max_tokens": 900}) as stream:
        next(iter(stream))
    ends = time.monotonic() + 20
    while engine.has_work or server.server.gate.inside:
        assert time.monotonic() < ends
        time.sleep(0.01)
    engine.cache.check([])
