"""Calls of Mistral's models, against examples of each version of their format."""

from __future__ import annotations

import pytest
from smelt.runtime.serve.answer.mistral import MistralParser
from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, WholeAnswer

from .cutting import calls, numbered, parts_of, read


def _make() -> MistralParser:
    return MistralParser(numbered())


def _read(text: str) -> WholeAnswer:
    return read(_make, text)


ADD = ("add", '{"a": 1, "b": 2}')
MULTIPLY = ("multiply", '{"a": 3}')


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ADD]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abc123xyz"}]', "", [ADD]),
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "multiply", "arguments": {"a": 3}}]',
            "",
            [ADD, MULTIPLY],
        ),
        (
            '[TOOL_CALLS] [\n  {"arguments": {"a": 1, "b": 2}, "name": "add"} ,\n {"name": "multiply", "arguments": {"a": 3}}\n]\n',
            "",
            [ADD, MULTIPLY],
        ),
        ('[TOOL_CALLS] {"name": "add", "arguments": {"a": 1, "b": 2}}', "", [ADD]),
        ('[TOOL_CALLS]add{"a": 1, "b": 2}', "", [ADD]),
        ('I add. [TOOL_CALLS]add{"a": 1, "b": 2}[TOOL_CALLS]multiply{"a": 3}', "I add.", [ADD, MULTIPLY]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', "", [ADD]),
        ('I add.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]multiply[ARGS]{"a": 3}', "I add.", [ADD, MULTIPLY]),
        ('[TOOL_CALLS] add [ARGS] {"a": 1, "b": 2}\n[TOOL_CALLS]multiply {"a": 3}\n', "", [ADD, MULTIPLY]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2} That is it.', " That is it.", [ADD]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}] That is it.', " That is it.", [ADD]),
        ("[TOOL_CALLS]a.b-c_d/e:f[ARGS]{}", "", [("a.b-c_d/e:f", "{}")]),
    ],
)
def test_calls_of_the_format(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = _read(text)
    assert answer.content == content
    assert calls(answer) == expected
    assert [id for id, _, _ in answer.calls] == [f"id{i}" for i in range(len(expected))]


def test_the_models_own_ids_are_kept_if_templates_accept_them() -> None:
    text = '[TOOL_CALLS]add[CALL_ID]abc123xyZ[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]12[ARGS]{"a": 2}'
    assert _read(text).calls == [("abc123xyZ", "add", '{"a": 1}'), ("id0", "add", '{"a": 2}')]


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"command": "mkdir {a,b}] [ARGS]"}',
        '{"text": "[TOOL_CALLS]f{} \\"[TOOL_CALLS]\\" "}',
        '{ "a" :[ 1,2 , {"b":null}],\n\t"c":  -1.50e+3 }',
        '{"text": "\\u00e9\\ud83d\\ude42 \\\\ \\n é🙂"}',
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "[TOOL_CALLS]f{}",
        "[TOOL_CALLS]f[ARGS]{}",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "f", "arguments": {}',
    ],
)
def test_arguments_are_returned_as_they_are_written(form: str, arguments: str) -> None:
    answer = _read(form.replace("{}", arguments))
    assert answer.content == ""
    assert calls(answer) == [("f", arguments)]


@pytest.mark.parametrize("head", ["now", "now[ARGS]", "now ", "now[CALL_ID]abcdefghi", "now[CALL_ID]abcdefghi[ARGS]"])
def test_a_call_without_arguments_has_an_empty_object(head: str) -> None:
    answer = _read(f"[TOOL_CALLS]{head}[TOOL_CALLS]add{{}}")
    assert answer.content == ""
    assert calls(answer) == [("now", "{}"), ("add", "{}")]
    in_array = _read('[TOOL_CALLS] [{"name": "now"}, {"name": "now", "arguments": null}]')
    assert calls(in_array) == [("now", "{}"), ("now", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "A list [1, 2], a set {3}, and [TOOLS] too.\n",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] ",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [1, 2]",
        "[TOOL_C",
        "[TOOL_CALLS][TOOL_CALLS]",
        "[TOOL_CALLS][TOOL_CARE]",
        "[TOOL_CALLS]I cannot {do} that",
        "[TOOL_CALLS]get_wea",
        "[TOOL_CALLS]get_weather[AR",
        "[TOOL_CALLS]get_weather[ARGS]",
        "[TOOL_CALLS]get_weather[ARGS]5",
        "[TOOL_CALLS]get_weather[CALL_ID]abc",
        "[TOOL_CALLS]get_weather[CALLED]{}",
        "[TOOL_CALLS][ARGS]{}",
        '[TOOL_CALLS] [{"name": "f", "argum',
        '[TOOL_CALLS] [{"city": "Paris"}, {"name": "f", "arguments": {}}]',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    answer = _read(text)
    assert answer.calls == []
    assert answer.content == text


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("[TOOL_CALLS]f{'a': 1}[TOOL_CALLS]g{}", "", [("f", "{'a': 1}"), ("g", "{}")]),
        ('[TOOL_CALLS]f{"a": [1}}\n[TOOL_CALLS]g{}', "", [("f", '{"a": [1}}\n'), ("g", "{}")]),
        ('[TOOL_CALLS]f{"a": 1[TOOL_CALLS]g{}', "", [("f", '{"a": 1'), ("g", "{}")]),
        ('[TOOL_CALLS]f{"a": "b}\n[TOOL_CALLS]g{}', "", [("f", '{"a": "b}\n'), ("g", "{}")]),
        ('[TOOL_CALLS]f{"a": 1}}', "}", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}]', "]", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}} oops', " oops", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"city": 1}]', ', {"city": 1}]', [("f", "{}")]),
        ('[TOOL_CALLS]hm [TOOL_CALLS]f{"a": 1}', "", [("hm", "{}"), ("f", '{"a": 1}')]),
        ('[TOOL_CALLS][TOOL_CALLS]f{"a": 1}', "[TOOL_CALLS]", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]add[AR[TOOL_CALLS]f{"a": 1}', "[TOOL_CALLS]add[AR", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]no call [TOOL_CALLS]f{"a": 1}', "[TOOL_CALLS]no call", [("f", '{"a": 1}')]),
    ],
)
def test_malformed_calls_are_returned_as_generated(text: str, content: str, expected: list[tuple[str, str]]) -> None:
    answer = _read(text)
    assert answer.content == content
    assert calls(answer) == expected


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]',
            '"arguments": {',
        ),
        ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 1}', "add{"),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', "[ARGS]{"),
    ],
)
def test_a_text_may_end_anywhere(text: str, begin: str) -> None:
    for size in range(len(text)):
        cut = text[:size]
        whole = WholeAnswer.of(_make(), cut)
        assert parts_of(_make(), cut) == parts_of(_make(), [cut])
        assert len(whole.calls) == cut.count(begin)
        if whole.calls:
            written = cut[cut.rindex(begin) + len(begin) - 1 :]
            assert whole.calls[-1][2] == written[: written.find("}") + 1 or None]
        else:
            assert whole.content == cut


def test_parts_come_as_early_as_they_can() -> None:
    parser = _make()
    assert parser.add("Hello [") == [Content("Hello")]
    assert parser.add("1] [TOOL_CALLS]ad") == [Content(" [1]")]
    assert parser.add("d[AR") == []
    assert parser.add('GS]{"a') == [CallStart(0, "id0", "add"), CallArguments(0, '{"a')]
    assert parser.add('": 1') == [CallArguments(0, '": 1')]
    assert parser.add("}[TOOL") == [CallArguments(0, "}")]
    assert parser.add("_CALLS]") == []
    assert parser.add("now") == []
    assert parser.end() == [Content(" [TOOL_CALLS]now")]


def test_ids_are_nine_letters_and_digits() -> None:
    ids = [id for _ in range(20) for id, _, _ in WholeAnswer.of(MistralParser(), "[TOOL_CALLS]f{}").calls]
    assert len(set(ids)) == 20
    assert all(len(id) == 9 and id.isascii() and id.isalnum() for id in ids)
