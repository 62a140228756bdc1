"""Items and events of an answer, by the API's documentation."""

from __future__ import annotations

import re
from typing import Any

from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, Part, Reasoning
from smelt.runtime.serve.openai.responses.events import OutputItems
from smelt.runtime.serve.openai.responses.items import Status

ENTRY = {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": []}


def _events(output: OutputItems, parts: list[Part], status: Status = "completed") -> list[dict[str, Any]]:
    """The events of an answer, with its items' ids numbered by their place."""
    found = []
    for part in parts:
        found += output.grow([part], [ENTRY] if part == Content("Hel") else [])
    found += output.end(status)
    kinds = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
    names = {}
    for number, form in enumerate(output.forms(status)):
        assert re.fullmatch(f"{kinds[form['type']]}_[0-9a-f]{{24}}", form["id"])
        names[form["id"]] = f"{kinds[form['type']]}_{number}"
    for event in found:
        if "item_id" in event:
            event["item_id"] = names[event["item_id"]]
        if "item" in event:
            event["item"]["id"] = names[event["item"]["id"]]
    return found


def test_the_events_of_all_kinds_of_items() -> None:
    output = OutputItems()
    found = _events(
        output,
        [
            Reasoning("th"),
            Reasoning("ink"),
            Content("Hel"),
            Content("lo"),
            CallStart(0, "call_1", "f"),
            CallArguments(0, '{"a":'),
            CallArguments(0, "1}"),
            CallStart(1, "call_2", "g"),
            CallArguments(1, "{}"),
        ],
    )
    rs: dict[str, Any] = {"item_id": "rs_0", "output_index": 0, "content_index": 0}
    msg: dict[str, Any] = {"item_id": "msg_1", "output_index": 1, "content_index": 0}
    fc: dict[str, Any] = {"item_id": "fc_2", "output_index": 2}
    text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    thought = {"id": "rs_0", "type": "reasoning", "summary": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant"}
    call = {"id": "fc_2", "type": "function_call", "call_id": "call_1", "name": "f"}
    other = {"id": "fc_3", "type": "function_call", "call_id": "call_2", "name": "g"}
    whole = {"type": "reasoning_text", "text": "think"}
    hello = {**text, "text": "Hello", "logprobs": [ENTRY]}
    assert found == [
        {"type": "response.output_item.added", "output_index": 0, "item": {**thought, "status": "in_progress"}},
        {"type": "response.content_part.added", **rs, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "response.reasoning_text.delta", **rs, "delta": "th"},
        {"type": "response.reasoning_text.delta", **rs, "delta": "ink"},
        {"type": "response.reasoning_text.done", **rs, "text": "think"},
        {"type": "response.content_part.done", **rs, "part": whole},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {**thought, "content": [whole], "status": "completed"},
        },
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {**message, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **msg, "part": text},
        {"type": "response.output_text.delta", **msg, "delta": "Hel", "logprobs": [ENTRY]},
        {"type": "response.output_text.delta", **msg, "delta": "lo", "logprobs": []},
        {"type": "response.output_text.done", **msg, "text": "Hello", "logprobs": [ENTRY]},
        {"type": "response.content_part.done", **msg, "part": hello},
        {
            "type": "response.output_item.done",
            "output_index": 1,
            "item": {**message, "status": "completed", "content": [hello]},
        },
        {
            "type": "response.output_item.added",
            "output_index": 2,
            "item": {**call, "status": "in_progress", "arguments": ""},
        },
        {"type": "response.function_call_arguments.delta", **fc, "delta": '{"a":'},
        {"type": "response.function_call_arguments.delta", **fc, "delta": "1}"},
        {"type": "response.function_call_arguments.done", **fc, "name": "f", "arguments": '{"a":1}'},
        {
            "type": "response.output_item.done",
            "output_index": 2,
            "item": {**call, "status": "completed", "arguments": '{"a":1}'},
        },
        {
            "type": "response.output_item.added",
            "output_index": 3,
            "item": {**other, "status": "in_progress", "arguments": ""},
        },
        {"type": "response.function_call_arguments.delta", "item_id": "fc_3", "output_index": 3, "delta": "{}"},
        {
            "type": "response.function_call_arguments.done",
            "item_id": "fc_3",
            "output_index": 3,
            "name": "g",
            "arguments": "{}",
        },
        {
            "type": "response.output_item.done",
            "output_index": 3,
            "item": {**other, "status": "completed", "arguments": "{}"},
        },
    ]
    assert [form["status"] for form in output.forms("incomplete")] == ["completed"] * 3 + ["incomplete"]
    assert output.reasoning == "think"


def test_an_answer_that_is_cut_off_has_an_incomplete_item() -> None:
    found = _events(OutputItems(), [Content("Hel"), CallStart(0, "call_1", "f"), CallArguments(0, '{"a')], "incomplete")
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in done] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert done[1]["arguments"] == '{"a'


def test_an_answer_without_anything_is_an_empty_message() -> None:
    output = OutputItems()
    assert [event["type"] for event in _events(output, [])] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    (form,) = output.forms("completed")
    assert form["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_log_probabilities_wait_for_their_text() -> None:
    first, second, third, last = ({**ENTRY, "token": name} for name in "abcd")
    output = OutputItems()
    # A character of two tokens; a text and a call that come at once; an end without text.
    events = [*output.grow([], [first]), *output.grow([Content("é")], [second])]
    events += output.grow([Content("!"), CallStart(0, "call_1", "f"), CallArguments(0, "{}")], [third])
    events += [*output.grow([], [last]), *output.end("completed")]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[first, second], [third]]
    assert output.forms("completed")[0]["content"][0]["logprobs"] == [first, second, third]


def test_tags_after_reasoning_have_no_log_probabilities() -> None:
    thought, tag, text = ({**ENTRY, "token": name} for name in "abc")
    output = OutputItems()
    events = [*output.grow([Reasoning("hm")], [thought]), *output.grow([], [tag]), *output.grow([Content("!")], [text])]
    assert not any("logprobs" in event for event in events if event["type"].startswith("response.reasoning"))
    assert output.forms("completed")[1]["content"][0]["logprobs"] == [text]
