"""Calls between ``<tool_call>`` tags, against what the format's own examples mean."""

from __future__ import annotations

import json

import pytest
from smelt.runtime.serve.answer.hermes import HermesParser
from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, WholeAnswer

from .cutting import calls, numbered, parts_of, read

PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def _make() -> HermesParser:
    return HermesParser(numbered())


def _read(text: str) -> WholeAnswer:
    return read(_make, text)


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (PARIS, "", [("get_weather", '{"city": "Paris"}')]),
        ("\n" + PARIS, "", [("get_weather", '{"city": "Paris"}')]),
        (
            f"I will look.\n{PARIS}\n{ROME}",
            "I will look.",
            [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Rome"}')],
        ),
        (PARIS + ROME, "", [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Rome"}')]),
        # As Hermes's own template has it.
        (
            '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock"}\n</tool_call> ',
            "",
            [("get_stock", '{"symbol": "TSLA"}')],
        ),
        ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "", [("f", '{"a":1}')]),
    ],
    ids=["one", "newline before", "two with content", "two", "arguments first", "compact"],
)
def test_calls_of_the_format(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = _read(text)
    assert answer.content == content
    assert calls(answer) == expected
    assert [id for id, _, _ in answer.calls] == [f"id{i}" for i in range(len(expected))]


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"command": "mkdir {a,b} && echo \\"}{\\""}',
        '{"name": "inner", "arguments": {"name": "x"}}',
        '{ "a" :[ 1,2 , {"b":null}],\n\t"c":  -1.50e+3 }',
        '{"text": "\\u00e9\\ud83d\\ude42 \\\\ \\n é🙂"}',
        '{"text": "write <tool_call>{\\"name\\": 1}</tool_call> and stop"}',
        '{"path": "C:\\\\"}',
        '{"n": 3}',
        '{"n": true}',
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
        '<tool_call>{"id": "x{", "name":"f" ,"arguments" :ARGUMENTS, "more": [{}]}</tool_call>',
        '<tool_call>\n{"arguments": ARGUMENTS, "name": "f"}\n</tool_call>\n',
        '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}',
        '<tool_call>\n{"name": "f", "arguments": ARGUMENTS',
    ],
)
def test_arguments_are_returned_as_they_are_written(form: str, arguments: str) -> None:
    answer = _read(form.replace("ARGUMENTS", arguments))
    assert answer.content == ""
    assert calls(answer) == [("f", arguments)]


@pytest.mark.parametrize(
    "written", ['{"name": "now"}', '{"name": "now", "arguments": null}', '{"name": "now", "arguments": ""}']
)
def test_a_call_without_arguments_has_an_empty_object(written: str) -> None:
    answer = _read(f"<tool_call>\n{written}\n</tool_call>")
    assert answer.content == ""
    assert calls(answer) == [("now", "{}")]


def test_arguments_in_a_string_are_unpacked() -> None:
    inner = '{"city": "Paris", "note": "a \\"quoted\\" } brace"}'
    answer = _read(f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(inner)}}}\n</tool_call>')
    assert calls(answer) == [("f", inner)]


@pytest.mark.parametrize(
    "text",
    [
        "A set is written {1, 2}; a tag is written <b>, and a<b is no tag.\n",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "The tag <tool_call> begins a call and </tool_call> ends it.",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_c",
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "Paris"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": None}\n</tool_call>',
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n{"city": "Paris"}\n</tool_call> and more',
        '<tool_call>\n{"name": "get_wea',
        '<tool_call>\n{"name": "get_weather", "argum',
        '<tool_call>\n{"name": "\\ud83d", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    answer = _read(text)
    assert answer.calls == []
    assert answer.content == text


def test_a_call_is_found_after_what_was_none() -> None:
    answer = _read(f"Use <tool_call> so:\n{PARIS}")
    assert answer.content == "Use <tool_call> so:"
    assert calls(answer) == [("get_weather", '{"city": "Paris"}')]
    twice = _read(f"<tool_call>{PARIS}")
    assert twice.content == "<tool_call>"
    assert calls(twice) == [("get_weather", '{"city": "Paris"}')]


def test_content_around_calls_keeps_its_space() -> None:
    answer = _read(f"First.\n\n{PARIS}\n{ROME}\nThen this. \n")
    assert answer.content == "First.\n\n\n\nThen this. \n"
    assert len(answer.calls) == 2
    assert _read(f"{PARIS} Then {ROME}").content == " Then"
    assert _read(PARIS.replace("}\n<", "}\n \n<") + "\nThen").content == "\nThen"


def test_an_answer_of_space_is_empty() -> None:
    assert _read(" \n\n") == WholeAnswer("", "", [])
    assert _read("a \n").content == "a \n"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        # The object's last brace is missing.
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
        # There is one too many.
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "}\n", [("f", '{"a": 1}')]),
        # The closing tag is missing.
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1 <tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "",
            [("f", '{"a": 1 '), ("g", "{}")],
        ),
        # A string is not closed: JSON allows no newline in it, so the tag after one is a tag.
        (
            f'<tool_call>\n{{"name": "f", "arguments": {{"a": "b}}}}\n</tool_call>\n{PARIS}',
            "",
            [("f", '{"a": "b}}\n'), ("get_weather", '{"city": "Paris"}')],
        ),
        # A newline was written into a string, which then goes on.
        (
            '<tool_call>\n{"name": "f", "arguments": {"code": "a = {\nb"}}\n</tool_call>',
            "",
            [("f", '{"code": "a = {\nb"}')],
        ),
        # Brackets do not match.
        (
            f'<tool_call>\n{{"name": "f", "arguments": {{"a": [1}}, "b": 2}}}}\n</tool_call>\n{PARIS}',
            "",
            [("f", '{"a": [1}, "b": 2}}\n'), ("get_weather", '{"city": "Paris"}')],
        ),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": [1}, "b": 2}} and',
            "",
            [("f", '{"a": [1}, "b": 2}} and')],
        ),
        # Python's way of writing.
        ('<tool_call>\n{"name": "f", "arguments": {\'a\': True}}\n</tool_call>', "", [("f", "{'a': True}")]),
    ],
)
def test_malformed_calls_are_returned_as_generated(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = _read(text)
    assert answer.content == content
    assert calls(answer) == expected


def test_a_text_may_end_anywhere() -> None:
    text = f"Look:\n{PARIS}\n{ROME}"
    for size in range(len(text)):
        cut = text[:size]
        whole = WholeAnswer.of(_make(), cut)
        assert parts_of(_make(), cut) == parts_of(_make(), [cut])
        begun = cut.count('"arguments": {')
        assert [name for _, name, _ in whole.calls] == ["get_weather"] * begun
        if begun:
            _, _, arguments = whole.calls[-1]
            written = cut[cut.rindex('"arguments": {') + len('"arguments": ') :]
            assert arguments == written[: written.find("}") + 1 or None]
        tail = cut[cut.rindex("<tool_call>") :] if "<tool_call>" in cut else ""
        if tail and '"arguments": {' not in tail:
            # What may have become a call is content, whole.
            assert whole.content.endswith(tail)
        else:
            assert whole.content.startswith("Look:"[:size])


def test_parts_come_as_early_as_they_can() -> None:
    parser = _make()
    assert parser.add("Hello <") == [Content("Hello")]
    assert parser.add("b> a") == [Content(" <b> a")]
    assert parser.add(' <tool_call>\n{"name": "get') == []
    assert parser.add('_weather", "arguments": ') == []
    assert parser.add('{"ci') == [CallStart(0, "id0", "get_weather"), CallArguments(0, '{"ci')]
    assert parser.add('ty": "</tool_') == [CallArguments(0, 'ty": "')]
    assert parser.add('x"') == [CallArguments(0, '</tool_x"')]
    assert parser.add("}}\n</tool_call>\n") == [CallArguments(0, "}")]
    assert parser.end() == []


def test_ids_have_openais_form() -> None:
    ids = [id for _ in range(20) for id, _, _ in WholeAnswer.of(HermesParser(), PARIS).calls]
    assert len(set(ids)) == 20
    for id in ids:
        assert id.startswith("call_")
        assert len(id) == len("call_") + 24
        int(id.removeprefix("call_"), 16)
