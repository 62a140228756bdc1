"""Talking with a checkpoint."""

from __future__ import annotations

import pytest
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.runtime.engine.chat import Chat, converse

from ...tiny import SMELT_6M
from ..drive import engine

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


def _said(running: Engine, lines: list[str], **options: str) -> str:
    out: list[str] = []
    answers = iter(lines)

    def read(_: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    converse(Chat(running, GREEDY, **options), read, out.append)
    return "".join(out)


def test_without_a_template_text_is_continued_and_reset_forgets() -> None:
    running = engine(SMELT_6M)
    first = running.generate("The city of", GREEDY)[0].outputs[0].text
    assert first is not None
    second = running.generate("The city of" + first + " And then", GREEDY)[0].outputs[0].text
    assert second is not None
    said = _said(running, ["The city of", " And then", "/reset", "The city of", "/nonsense"])
    assert "no chat template" in said
    assert said.count(first) >= 2
    assert second in said
    assert "conversation cleared" in said
    assert "unknown command /nonsense" in said
    assert said.count("prompt tokens, first token after") == 3
    running.cache.check([])


def test_a_template_sees_the_whole_conversation() -> None:
    running = engine(SMELT_6M)
    running.tokenizer.chat_template = TEMPLATE
    chat = Chat(running, GREEDY, "Be brief.")
    first = ""

    def hear(text: str) -> None:
        nonlocal first
        first += text

    chat.answer("Hello", hear)
    assert running.tokenizer.decode(chat._prompt("Bye")) == (
        f"[system] Be brief.\n[user] Hello\n[assistant] {first}\n[user] Bye\n[assistant] "
    )


def test_a_conversation_that_is_too_long_is_said_and_can_begin_anew() -> None:
    running = engine(SMELT_6M, max_model_len=40)
    said = _said(running, ["word " * 60, "/reset", "The city"])
    assert "leaves no room to continue it; /reset starts over" in said
    assert said.count("prompt tokens, first token after") == 1


def test_conversations_are_answered_as_texts_of_the_template() -> None:
    running = engine(SMELT_6M)
    with pytest.raises(RuntimeProblem, match="no chat template"):
        running.chat([{"role": "user", "content": "Hello"}], GREEDY)
    running.tokenizer.chat_template = TEMPLATE
    one, two = ([{"role": "user", "content": text}] for text in ("Hello", "Who is there?"))
    texts = [f"[user] {each[0]['content']}\n[assistant] " for each in (one, two)]
    ids = [running.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    expected = [output.outputs[0].token_ids for output in running.generate(ids, GREEDY)]
    assert [output.outputs[0].token_ids for output in running.chat([one, two], GREEDY)] == expected
    assert running.chat(one, GREEDY)[0].outputs[0].token_ids == expected[0]
    with pytest.raises(RuntimeProblem, match="SamplingParams"):
        running.generate("hi", {"max_tokens": 3})  # type: ignore[arg-type]
