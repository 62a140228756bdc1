"""Answers of one call."""

from __future__ import annotations

from smelt.runtime.serve.answer.hermes import HermesParser
from smelt.runtime.serve.answer.parts import FirstCall, WholeAnswer

TEXT = 'Two.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def test_calls_after_the_first_are_left_out_however_the_text_is_cut() -> None:
    whole = WholeAnswer.of(FirstCall(HermesParser()), TEXT)
    assert [(name, arguments) for _, name, arguments in whole.calls] == [("f", '{"a": 1}')]
    parser = FirstCall(HermesParser())
    parts = [part for letter in TEXT for part in parser.add(letter)] + parser.end()
    assert {getattr(part, "index", 0) for part in parts} == {0}
    assert len(WholeAnswer.of(HermesParser(), TEXT).calls) == 2
