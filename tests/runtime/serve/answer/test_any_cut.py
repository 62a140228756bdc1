"""Any text that a model may write, read by all parsers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smelt.runtime.serve.answer.hermes import HermesParser
from smelt.runtime.serve.answer.json_scan import is_object
from smelt.runtime.serve.answer.llama3_json import Llama3JsonParser
from smelt.runtime.serve.answer.mistral import MistralParser
from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, Parser, Reasoning, WholeAnswer
from smelt.runtime.serve.answer.reasoning import ReasoningParser
from smelt.runtime.serve.answer.schema import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL_ARGS,
    MISTRAL_ARRAY,
    MISTRAL_NAMES,
    CallFormat,
)

from .cutting import MakeParser, numbered, parts_of
from .json_objects import OBJECTS
from .json_objects import written as written_as

MAKE: dict[str, MakeParser] = {
    "hermes": lambda: HermesParser(numbered()),
    "llama3_json": lambda: Llama3JsonParser(numbered()),
    "mistral": lambda: MistralParser(numbered()),
}
FORMATS = [
    ("hermes", HERMES),
    ("llama3_json", LLAMA3_JSON),
    ("mistral", MISTRAL_ARRAY),
    ("mistral", MISTRAL_NAMES),
    ("mistral", MISTRAL_ARGS),
]
_COMMON = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ":",
    ",",
    ";",
    " ",
    "\n",
    "a",
    "<",
    "é",
    '{"',
    '"name": "f"',
    '"arguments": {',
    "null",
]
SCRAPS = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        "<tool_call>\n{",
        '{"name": "f", "arguments": {}}',
        "}}",
        '"arguments": "',
    ],
    "llama3_json": ["<|python_tag|>", '"parameters": {', '{"name": "f", "parameters": {', "}}", "}}; "],
    "mistral": [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[TOOL_CALLS]f{",
        "[TOOL_CALLS] [",
        "abcdefghi",
        '{"name": "f"}',
        "[T",
    ],
}


def _pieces(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), label="cuts"))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.few(2)
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_scraps_of_the_format_are_read_alike_however_they_are_cut(name: str, thinks: bool, data: st.DataObject) -> None:
    scraps = _COMMON + SCRAPS[name] * 2 + (["<think>", "</think>"] if thinks else [])
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=14), label="scraps"))
    is_open = thinks and data.draw(st.booleans(), label="open")

    def make() -> Parser:
        return ReasoningParser(MAKE[name](), is_open=is_open) if thinks else MAKE[name]()

    whole = parts_of(make(), [text])
    assert parts_of(make(), list(text)) == whole
    assert parts_of(make(), _pieces(data, text)) == whole
    starts = [part for part in whole if isinstance(part, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    begun = -1
    for part in whole:
        match part:
            case CallStart(index, _, called):
                begun = index
                assert called
            case CallArguments(index, arguments):
                assert index == begun
                assert arguments in text or arguments == "{}" or is_object(arguments)
            case _:
                pass
    # Nothing is made up, and nothing changes places.
    rest = iter(text)
    assert all(character in rest for part in whole if isinstance(part, (Content, Reasoning)) for character in part.text)
    if not starts and not thinks:
        assert "".join(part.text for part in whole if isinstance(part, Content)) == (text if text.strip() else "")


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "form"), FORMATS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    given_calls=st.lists(
        st.tuples(st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True), OBJECTS, st.integers(0, 7)), max_size=3
    ),
    content=st.text("abc .,\n<é'", max_size=20),
    data=st.data(),
)
def test_calls_are_read_back(
    name: str, form: CallFormat, given_calls: list[tuple[str, dict[str, Any], int]], content: str, data: st.DataObject
) -> None:
    """Any arguments in any of json's styles, after any content."""
    written = [(tool, written_as(arguments, style)) for tool, arguments, style in given_calls]
    text = content
    if written:
        calls = form.separator.join(form.before(tool) + arguments + form.end for tool, arguments in written)
        text += form.first + calls + form.last
    answer = WholeAnswer.of(MAKE[name](), text)
    assert [(tool, arguments) for _, tool, arguments in answer.calls] == written
    assert [json.loads(arguments) for _, _, arguments in answer.calls] == [arguments for _, arguments, _ in given_calls]
    if written:
        assert answer.content == content.rstrip()
    else:
        assert answer.content == (content if content.strip() else "")
    assert parts_of(MAKE[name](), _pieces(data, text)) == parts_of(MAKE[name](), [text])


@pytest.mark.parametrize(("name", "form"), FORMATS)
def test_arguments_are_not_held_back(name: str, form: CallFormat) -> None:
    """Of what was written, at most the beginning of a tag is missing."""
    arguments = json.dumps({"text": "a < b, [1], {2}; " * 20, "more": [{"deep": {"er": "}"}}] * 5})
    parser, seen = MAKE[name](), ""
    for part in parser.add("So: " + form.first + form.before("f")):
        assert not isinstance(part, CallArguments)
    for size, character in enumerate(arguments, 1):
        seen += "".join(part.text for part in parser.add(character) if isinstance(part, CallArguments))
        assert arguments.startswith(seen)
        assert size - len(seen) < len("<|python_tag|>")
        assert size == len(seen) or character in "<["
    assert seen == arguments


@pytest.mark.parametrize("name", MAKE)
def test_long_texts_take_no_longer_than_their_length(name: str) -> None:
    """Each of these would be read again from every brace or tag on, if what was no call were read twice."""
    for text in (
        '{"a":' * 10_000,
        "{" * 40_000,
        "<tool_call>{" * 5_000,
        "[TOOL_CALLS]{" * 10_000,
        '{"name": "f", "b": ' * 5_000,
    ):
        answer = WholeAnswer.of(MAKE[name](), text)
        assert answer.content == text
        assert answer.calls == []
