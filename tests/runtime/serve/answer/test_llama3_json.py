"""Calls of Llama 3, against what Meta's description of the format says of them."""

from __future__ import annotations

import pytest
from smelt.runtime.serve.answer.llama3_json import Llama3JsonParser
from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, WholeAnswer

from .cutting import calls, numbered, parts_of, read

PARIS = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
ROME = '{"name": "get_weather", "parameters": {"city": "Rome"}}'


def _make() -> Llama3JsonParser:
    return Llama3JsonParser(numbered())


def _read(text: str) -> WholeAnswer:
    return read(_make, text)


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (PARIS, "", ["Paris"]),
        (f"<|python_tag|>{PARIS}", "", ["Paris"]),
        (f"<|python_tag|>\n {PARIS}\n", "", ["Paris"]),
        (f"{PARIS}; {ROME}", "", ["Paris", "Rome"]),
        (f"{PARIS};{ROME};", "", ["Paris", "Rome"]),
        (f"{PARIS}\n;\t {ROME}", "", ["Paris", "Rome"]),
        (f"{PARIS}{ROME}", "", ["Paris", "Rome"]),
        (f"<|python_tag|>{PARIS}; <|python_tag|>{ROME}", "", ["Paris", "Rome"]),
        (f"I will look: {PARIS}", "I will look:", ["Paris"]),
        (f"{PARIS}; {ROME}\nDone; really;", " \nDone; really;", ["Paris", "Rome"]),
        (f"{PARIS}; and so on", "; and so on", ["Paris"]),
        (f"A set {{x}} and {{1, 2}} {PARIS}", "A set {x} and {1, 2}", ["Paris"]),
        (f'An object {{"a": {{}}}} {PARIS}', 'An object {"a": {}}', ["Paris"]),
        (f"{{{PARIS}}}", "{}", ["Paris"]),
    ],
)
def test_calls_of_the_format(text: str, content: str, expected: list[str]) -> None:
    answer = _read(text)
    assert answer.content == content
    assert calls(answer) == [("get_weather", f'{{"city": "{city}"}}') for city in expected]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"type": "function", "name": "f", "parameters": {"a": "x}"}}', '{"a": "x}"}'),
        ('{"type": "function", "function": "f", "name": "f", "parameters": {}}', "{}"),
        ('{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}, "arguments": {"b": 2}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}', '{"a": 1}'),
        ('{"parameters": {"name": "g"}, "name": "f"}', '{"name": "g"}'),
        ('{"name": "f", "parameters": null}', "{}"),
        ('{"name": "f", "parameters": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": [1', '{"a": [1'),
        ('{"name": "f", "parameters": {"a": [1}}} more {"b"', '{"a": [1}}} more {"b"'),
        ('{"name": "f", "parameters": {"tag": "<|python_tag|>{\\"name\\""}}', '{"tag": "<|python_tag|>{\\"name\\""}'),
    ],
)
def test_variants(text: str, arguments: str) -> None:
    answer = _read(text)
    assert answer.content == ""
    assert calls(answer) == [("f", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        'In C one writes `int main() { return 0; }`; in JSON {"a": 1}.\n',
        '{"name": "Alice", "age": 7}',
        '{"name": "Alice"}',
        '{"parameters": {"a": 1}}',
        '{"name": "f", "parameters": [1, 2]}',
        '{"name": "f", "parameters": 3}',
        # What is inside an object is no call.
        f'{{"calls": [{PARIS}]}}',
        f'{{"name": 1, "parameters": {PARIS}}}',
        # The built-in tools' calls are not JSON.
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_tag|>",
        "<|python",
        "{",
        '{"name": "get_wea',
        '{"name": "f", "param',
        '{"name": "f", "parameters": "{',
        "{{{{",
        "a; b; ",
        ";",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    answer = _read(text)
    assert answer.calls == []
    assert answer.content == text


def test_a_text_may_end_anywhere() -> None:
    text = f"{PARIS}; {ROME}"
    for size in range(len(text)):
        cut = text[:size]
        whole = WholeAnswer.of(_make(), cut)
        assert parts_of(_make(), cut) == parts_of(_make(), [cut])
        begun = cut.count('"parameters": {')
        assert len(whole.calls) == begun
        tail = cut[cut.rindex('{"name') :] if '{"name' in cut else cut
        if begun and '"parameters": {' in tail:
            written = cut[cut.rindex('"parameters": {') + len('"parameters": ') :]
            assert whole.calls[-1][2] == written[: written.find("}") + 1 or None]
        elif begun == 0:
            assert whole.content == tail
        else:
            assert whole.content.lstrip("; ") == tail


def test_prose_is_held_back_only_within_an_object() -> None:
    parser = _make()
    assert parser.add("f(x) {") == [Content("f(x)")]
    assert parser.add(" re") == [Content(" {"), Content(" re")]
    assert parser.add('turn {"name": "a"') == [Content("turn")]
    assert parser.add("}.") == [Content(' {"name": "a"}'), Content(".")]
    assert parser.add(' {"name": "a", "parameters": {') == [CallStart(0, "id0", "a"), CallArguments(0, "{")]
    assert parser.add('"b": 1') == [CallArguments(0, '"b": 1')]
    assert parser.add("}}; ") == [CallArguments(0, "}")]
    assert parser.end() == []
