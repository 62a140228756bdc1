"""Conversations as a model's template writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.models.text.chat_template import conversation_tokens, given_template
from smelt.system.errors import SmeltError
from transformers import AutoTokenizer

from ...tiny import SMELT_6M

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tone }}"


def test_variables_of_a_template_are_given_and_settings_of_the_tokenizer_are_not() -> None:
    """A server gives what requests say: another template could run for ever, and padding take all memory."""
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    tokenizer.chat_template = TEMPLATE
    turns = [{"role": "user", "content": "The house"}]
    plain = conversation_tokens(tokenizer, turns)
    assert tokenizer.decode(conversation_tokens(tokenizer, turns, template={"tone": " was old"})).endswith("was old")
    assert conversation_tokens(tokenizer, turns, template={"documents": [{"text": "a"}]}) == plain
    endless = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    for name, value in (
        ("chat_template", endless),
        ("padding", "max_length"),
        ("max_length", 10**9),
        ("return_tensors", "pt"),
        ("tokenizer_kwargs", {"padding": "max_length"}),
        ("tokenize", False),
    ):
        with pytest.raises(SmeltError, match=f"^{name} is no variable of the model's chat template"):
            conversation_tokens(tokenizer, turns, template={name: value})


def test_a_template_is_given_by_file_or_as_it_is(tmp_path: Path) -> None:
    assert given_template(TEMPLATE) == TEMPLATE
    file = tmp_path / "mine.jinja"
    # transformers' tag for what is trained on, which Jinja alone does not know, and a loop's break.
    text = "{% for m in messages %}{% generation %}{{ m.content }}{%- endgeneration -%}{% break %}{% endfor %}"
    file.write_text(text)
    assert given_template(str(file)) == text
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    tokenizer.chat_template = text
    assert tokenizer.decode(conversation_tokens(tokenizer, [{"role": "user", "content": "The house"}])) == "The house"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{{ messages", "line 1: is not a Jinja template"),
        (b"\xff\xfe{{ a }}", "cannot be read .it is not UTF-8"),
        (None, "cannot be read .No such file"),
    ],
)
def test_what_is_no_template_is_refused(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SmeltError, match=says):
        given_template(str(file))
