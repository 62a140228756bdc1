"""Reasoning before an answer, with and without calls after it."""

from __future__ import annotations

import pytest
from smelt.runtime.serve.answer.hermes import HermesParser
from smelt.runtime.serve.answer.mistral import MistralParser
from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, Parser, Plain, Reasoning, WholeAnswer
from smelt.runtime.serve.answer.reasoning import (
    MISTRAL_THINK,
    THINK,
    ReasoningParser,
    ReasoningTags,
    opens_reasoning,
    text_opens_reasoning,
)

from .cutting import MakeParser, calls, numbered, read

PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def _reads(*, is_open: bool, rest: MakeParser = Plain, tags: ReasoningTags = THINK) -> MakeParser:
    def make() -> Parser:
        return ReasoningParser(rest(), is_open=is_open, tags=tags)

    return make


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        # The template opened it, as DeepSeek R1's does.
        ("Okay, a < b.\nSo.\n</think>\n\nThe answer\n", "Okay, a < b.\nSo.", "The answer\n"),
        ("\nOkay\n\n</think>Yes", "Okay", "Yes"),
        ("Okay, not finished\n", "Okay, not finished", ""),
        ("</think>\n\nAt once", "", "At once"),
        ("\n\n</think>\n\n", "", ""),
        ("Okay</thin", "Okay</thin", ""),
        ("", "", ""),
        ("a </think> b </think> c <think>", "a ", " b </think> c <think>"),
        # The model opens it again.
        ("<think>\nOkay\n</think>\nYes", "Okay", "Yes"),
        ("\n<think>Okay</think>Yes", "Okay", "Yes"),
        ("<thin", "<thin", ""),
        ("<thing> is a tag</think>Yes", "<thing> is a tag", "Yes"),
        ("Okay <think> again</think>Yes", "Okay <think> again", "Yes"),
    ],
)
def test_reasoning_that_the_prompt_opened(text: str, reasoning: str, content: str) -> None:
    assert read(_reads(is_open=True), text) == WholeAnswer(content, reasoning, [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nOkay\n\nSo\n</think>\n\nYes.", "Okay\n\nSo", "Yes."),
        ("\n <think>Okay</think>Yes", "Okay", "Yes"),
        ("<think>\n\n</think>\n\nYes", "", "Yes"),
        ("<think>Okay, not finished", "Okay, not finished", ""),
        ("<think>", "", ""),
        ("<think></think>", "", ""),
        ("<think>Okay</think>\n", "Okay", ""),
        ("No reasoning.\n", "", "No reasoning.\n"),
        ("\n\nYes", "", "\n\nYes"),
        ("<thin", "", "<thin"),
        ("<b>Yes</b></think>", "", "<b>Yes</b></think>"),
        ("The tag <think> opens it.", "", "The tag <think> opens it."),
        ("", "", ""),
    ],
)
def test_reasoning_that_the_model_opens(text: str, reasoning: str, content: str) -> None:
    assert read(_reads(is_open=False), text) == WholeAnswer(content, reasoning, [])


def test_mistrals_tags() -> None:
    answer = read(
        _reads(is_open=False, rest=lambda: MistralParser(numbered()), tags=MISTRAL_THINK),
        '[THINK]Add </think> them.[/THINK]I add.[TOOL_CALLS]add[ARGS]{"a": 1}',
    )
    assert answer == WholeAnswer("I add.", "Add </think> them.", [("id0", "add", '{"a": 1}')])


def _hermes() -> Parser:
    return HermesParser(numbered())


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        (f"I need the weather.\n</think>\n\n{PARIS}", True, "I need the weather.", ""),
        (f"<think>\nI need it.\n</think>\n\nI look.\n{PARIS}", False, "I need it.", "I look."),
        (f"</think>{PARIS}", True, "", ""),
        # A model that does not think still calls.
        (PARIS, False, "", ""),
        (f"\n\n{PARIS}", False, "", ""),
    ],
)
def test_calls_after_reasoning(text: str, is_open: bool, reasoning: str, content: str) -> None:
    answer = read(_reads(is_open=is_open, rest=_hermes), text)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert calls(answer) == [("get_weather", '{"city": "Paris"}')]


def test_a_call_within_reasoning_is_reasoning() -> None:
    answer = read(_reads(is_open=True, rest=_hermes), f"I could write {PARIS}, but no.</think>Hello")
    assert answer == WholeAnswer("Hello", f"I could write {PARIS}, but no.", [])


def test_parts_come_as_early_as_they_can() -> None:
    parser = ReasoningParser(_hermes(), is_open=False)
    assert parser.add("\n<thi") == []
    assert parser.add("nk>\n") == []
    assert parser.add("Okay\n") == [Reasoning("Okay")]
    assert parser.add("so </") == [Reasoning("\nso ")]
    assert parser.add("b></think>\n") == [Reasoning("</b>")]
    assert parser.add("\nYes") == [Content("Yes")]
    assert parser.add('<tool_call>{"name": "f", "arguments": {') == [CallStart(0, "id0", "f"), CallArguments(0, "{")]
    assert parser.end() == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([], False),
        ([1, 2, 3], False),
        ([1, 7, 2], True),
        ([1, 7], True),
        ([1, 7, 2, 8, 2], False),
        ([7, 8, 1, 7, 2], True),
        ([8, 7, 8], False),
    ],
)
def test_the_last_tag_of_a_prompt_decides(prompt: list[int], expected: bool) -> None:
    assert opens_reasoning(prompt, 7, 8) is expected


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>\nOkay, so", True),
        ("<think>Okay</think>Yes<｜Assistant｜><think>\n", True),
        ("", False),
        ("</think>", False),
    ],
)
def test_the_last_tag_of_a_templates_end_decides(tail: str, expected: bool) -> None:
    assert text_opens_reasoning(tail) is expected
    in_brackets = tail.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    assert text_opens_reasoning(in_brackets, MISTRAL_THINK) is expected
