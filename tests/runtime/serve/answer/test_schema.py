"""What a constrained call looks like: the parser of the same format reads it back."""

from __future__ import annotations

import json

import pytest
from smelt.runtime.serve.answer.parts import WholeAnswer
from smelt.runtime.serve.answer.schema import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL_ARGS,
    MISTRAL_ARRAY,
    MISTRAL_NAMES,
    CallFormat,
    call_format,
)
from smelt.runtime.serve.answer.table import PARSERS

from .test_table import MISTRAL_ARGS as ARGS_TEMPLATE
from .test_table import MISTRAL_ARRAY as ARRAY_TEMPLATE

CALLS = [
    ("get_weather", json.dumps({"city": 'Paris "}</tool_call>'})),
    ("NAME", "{}"),
    ("mcp-tool_2", json.dumps({"a": [1, {"name": "x"}]}, indent=1)),
]
ROWS = [
    ("hermes", HERMES),
    ("llama3_json", LLAMA3_JSON),
    ("mistral", MISTRAL_ARRAY),
    ("mistral", MISTRAL_NAMES),
    ("mistral", MISTRAL_ARGS),
]


@pytest.mark.parametrize(("parser", "form"), ROWS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("content", ["", "I will look."])
def test_written_calls_are_read_back(parser: str, form: CallFormat, count: int, content: str) -> None:
    written = form.separator.join(form.before(name) + arguments + form.end for name, arguments in CALLS[:count])
    answer = WholeAnswer.of(PARSERS[parser](), content + form.first + written + form.last)
    assert answer.content == content
    assert [(name, arguments) for _, name, arguments in answer.calls] == CALLS[:count]


def test_texts_around_a_call() -> None:
    assert HERMES.before("f") + "{}" + HERMES.end == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert LLAMA3_JSON.before('a"b') == '{"name": "a\\"b", "parameters": '
    assert MISTRAL_ARGS.before("f") == "[TOOL_CALLS]f[ARGS]"


@pytest.mark.parametrize(
    ("parser", "template", "expected"),
    [
        ("hermes", "", HERMES),
        ("llama3_json", "", LLAMA3_JSON),
        ("mistral", ARRAY_TEMPLATE, MISTRAL_ARRAY),
        ("mistral", '{{ "[TOOL_CALLS][" }}', MISTRAL_ARRAY),
        ("mistral", ARGS_TEMPLATE, MISTRAL_ARGS),
        ("mistral", '{{ "[TOOL_CALLS]" + name + arguments }}', MISTRAL_NAMES),
    ],
)
def test_a_models_format(parser: str, template: str, expected: CallFormat) -> None:
    assert call_format(parser, template) == expected
