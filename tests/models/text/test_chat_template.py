"""Conversations as a model's template writes them."""

from __future__ import annotations

import pytest
from smelt.models.text.chat_template import conversation_tokens
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
