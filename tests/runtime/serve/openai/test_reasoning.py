"""Reasoning whose tags are several tokens, which users may write, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.model.answer_format import AnswerOptions
from smelt.runtime.serve.model.served_model import ServedModel

from ....tiny import SMELT_6M
from ..serving import TEMPLATE, serving

BEGIN = "<|assistant|>"
TEMPLATES = {
    "opens": TEMPLATE.replace(BEGIN, f"{BEGIN}<think>\n"),
    # As Qwen3's, which leaves out what was thought before.
    "knows": TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}"),
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    models = [
        ServedModel(name, engine, SMELT_6M, options=AnswerOptions(chat_template=each))
        for name, each in TEMPLATES.items()
    ]
    with serving(models) as found:
        yield f"{found.url}/v1/chat/completions"


def ask(url: str, model: str, content: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "max_tokens": 60, "temperature": 0, **options}
    return httpx2.post(url, json=body, timeout=60).raise_for_status().json()["choices"][0]["message"]


@pytest.mark.parametrize("model", TEMPLATES)
def test_what_a_constraint_holds_for_from_the_start_is_no_reasoning(url: str, model: str) -> None:
    """Nobody sees that the next token begins the end of the reasoning."""
    found = ask(url, model, "hi", structured_outputs={"choice": ["yes", "no"]})
    assert (found["content"] in ("yes", "no"), found.get("reasoning_content")) == (True, None)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    found = ask(url, model, "hi", response_format=form)
    assert (json.loads(found["content"]).keys(), found.get("reasoning_content")) == ({"a"}, None)
    tool = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    found = ask(url, model, "hi", tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["pick"]


def test_only_the_template_opens_reasoning(url: str) -> None:
    said = ask(url, "knows", "What does <think> mean?")
    assert said["content"]
    assert not said.get("reasoning_content")
    said = ask(url, "opens", "What does </think> mean?")
    assert said["reasoning_content"]
    assert not said["content"]


@pytest.mark.parametrize(
    ("begun", "is_open"), [("<think>\nHm, so", True), ("<think>\nHm.\n</think>\nIt is", False), ("It is", False)]
)
def test_an_answer_that_is_continued_may_have_opened_it(url: str, begun: str, is_open: bool) -> None:
    body = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": begun}]
    found = ask(url, "opens", "", **body, messages=messages)
    assert bool(found.get("reasoning_content")) is is_open
    assert bool(found["content"]) is not is_open
