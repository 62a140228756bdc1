"""Content blocks and their events, against the sequences that Anthropic's documentation of streaming shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from smelt.runtime.serve.answer.hermes import HermesParser
from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, Part, Reasoning
from smelt.runtime.serve.answer.reasoning import ReasoningParser
from smelt.runtime.serve.anthropic.blocks import ContentBlocks

from ..answer.cutting import cuts, numbered

ALL: list[Part] = [
    Reasoning("hm"),
    Content("Hel"),
    Content(""),
    Content("lo"),
    CallStart(0, "call_1", "f"),
    CallArguments(0, '{"a":'),
    CallArguments(0, " 1}"),
]


def _events(blocks: ContentBlocks, parts: list[Part]) -> list[dict[str, Any]]:
    return [*blocks.add(parts), *blocks.end()]


def _folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks as a client puts them together."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            arguments = ""
            continue
        block = blocks[-1]
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments or "{}")
            continue
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                block["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                block["signature"] += text
            case {"type": "input_json_delta", "partial_json": text}:
                arguments += text
            case _:
                pytest.fail(str(event))
    return blocks


def test_the_events_of_every_kind_of_block() -> None:
    blocks = ContentBlocks()
    events = _events(blocks, ALL)
    signature = events[2]["delta"]["signature"]
    assert signature
    wanted = [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": signature}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2,
         "content_block": {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": " 1}"}},
        {"type": "content_block_stop", "index": 2},
    ]  # fmt: skip
    assert events == wanted
    assert blocks.has_calls
    assert blocks.content == [
        {"type": "thinking", "thinking": "hm", "signature": signature},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
    ]


def test_nothing_is_no_block() -> None:
    blocks = ContentBlocks()
    assert _events(blocks, []) == _events(blocks, [Content(""), Reasoning("")]) == []
    assert blocks.content == []
    assert not blocks.has_calls


def test_pieces_add_up_to_the_whole_however_they_are_cut() -> None:
    text = (
        '<think>\nLet me see.\n</think>\n\nI will.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    wanted = [
        {"type": "thinking", "thinking": "Let me see."},
        {"type": "text", "text": "I will."},
        {"type": "tool_use", "id": "id0", "name": "f", "input": {"a": "é"}},
        {"type": "tool_use", "id": "id1", "name": "g", "input": {}},
    ]
    for pieces in [[text], *cuts(text)]:
        blocks = ContentBlocks()
        parser = ReasoningParser(HermesParser(numbered()), is_open=False)
        events = [event for piece in pieces for event in blocks.add(parser.add(piece))]
        events += [*blocks.add(parser.end()), *blocks.end()]
        assert _folded(events) == blocks.content
        assert [{key: block[key] for key in block if key != "signature"} for block in blocks.content] == wanted, pieces


def test_text_after_a_call_is_a_block_after_it() -> None:
    blocks = ContentBlocks()
    events = _events(blocks, [Content("a"), CallStart(0, "b", "f"), Content("c"), CallStart(1, "d", "g"), Content("e")])
    assert _folded(events) == blocks.content
    assert [block["type"] for block in blocks.content] == ["text", "tool_use", "text", "tool_use", "text"]


def test_thinking_that_is_not_shown_keeps_its_block() -> None:
    blocks = ContentBlocks(shows_thinking=False)
    events = _events(blocks, ALL[:3])
    assert [event["delta"]["type"] for event in events if "delta" in event] == ["signature_delta", "text_delta"]
    assert blocks.content[0]["thinking"] == ""
    assert _folded(events) == blocks.content


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", {}),
        ('{"a": [1, {"b": null}], "c": "\\u00e9"}', {"a": [1, {"b": None}], "c": "é"}),
        ('{"a": 1, "b": "cut o', {"a": 1}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1, 2]}}),
        ('{"a": tru!}', {"INVALID_JSON": '{"a": tru!}'}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": 1e999}', {"INVALID_JSON": '{"a": 1e999}'}),
        ('{"a": "\\ud800"}', {"INVALID_JSON": '{"a": "\\ud800"}'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": ' + "[" * 2000, {"INVALID_JSON": '{"a": ' + "[" * 2000}),
        ('{"a": ' + "9" * 5000 + "}", {"INVALID_JSON": '{"a": ' + "9" * 5000 + "}"}),
    ],
    ids=[
        "none",
        "json",
        "cut off",
        "cut off within",
        "no json",
        "nan",
        "infinite",
        "surrogate",
        "list",
        "deep",
        "long",
    ],
)
def test_inputs_are_objects_that_can_be_sent(arguments: str, wanted: dict[str, Any]) -> None:
    blocks = ContentBlocks()
    _events(blocks, [CallStart(0, "a", "f"), CallArguments(0, arguments)])
    assert blocks.content[0]["input"] == wanted
    assert json.loads(json.dumps(blocks.content, allow_nan=False, ensure_ascii=False).encode()) == blocks.content


@pytest.mark.parametrize(("id", "wanted"), [("call_0a1b", "toolu_0a1b"), ("abcdefghi", "abcdefghi")])
def test_ids_in_the_models_own_form_stay(id: str, wanted: str) -> None:
    blocks = ContentBlocks()
    blocks.add([CallStart(0, id, "f")])
    assert blocks.content[0]["id"] == wanted
