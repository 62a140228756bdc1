"""A conversation as a model's own template writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from ...system.errors import SmeltError, in_one_line
from ...system.storage.paths import named_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# transformers' own tag, which Jinja does not know.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def given_template(given: str) -> str:
    """A chat template to use instead of a model's own.

    Args:
        given: a file, or the template itself, as vLLM's ``--chat-template`` takes it.

    Raises:
        SmeltError: the file cannot be read, or it is no Jinja template.
    """
    from jinja2 import Environment, TemplateSyntaxError

    is_file = "{{" not in given and "{%" not in given
    try:
        text = named_path(given).read_text(encoding="utf-8") if is_file else given
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SmeltError(
            f"the chat template {given} cannot be read ({why}); name a file with a Jinja template"
        ) from None
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        where = f"{given}, line {error.lineno}" if is_file else "the chat template"
        raise SmeltError(f"{where}: is not a Jinja template ({error.message}); correct it") from None
    return text


def conversation_text(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    *,
    continue_last: bool = False,
) -> str:
    """Write a conversation as text, ready for an answer.

    The template is a program shipped with the model. transformers runs it in a sandbox, which limits it to producing
    text; it may still fail, or refuse the conversation.

    Args:
        tokenizer: of the model, with a template.
        turns: messages, each with a role and a content.
        continue_last: continue the last message instead of answering it.

    Raises:
        SmeltError: the template fails.
    """
    try:
        written: Any = tokenizer.apply_chat_template(
            list(turns),
            tokenize=False,
            add_generation_prompt=not continue_last,
            continue_final_message=continue_last,
        )
    except Exception as error:  # anything that the template's code raises, including MemoryError
        raise SmeltError(
            f"the model's chat template fails on this conversation ({in_one_line(error)}); fix chat_template in its tokenizer files"
        ) from None
    return written


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    continue_last: bool = False,
    answer: bool = True,
    template: dict[str, Any] | None = None,
) -> list[int]:
    """A conversation's tokens as the model's template writes it. What messages contain of its control tokens is text.

    Args:
        tokenizer: of the model, with a template.
        turns: messages, in OpenAI's form.
        tools: that the model may call, in OpenAI's form.
        continue_last: continue the last message instead of answering it.
        answer: end with the beginning of an answer.
        template: further variables of the template.

    Raises:
        SmeltError: the template fails, or a variable is one of the tokenizer's own settings.
    """
    # Whoever sends a conversation may come from outside: another template could run for ever, and padding take all memory.
    settings = {*signature(tokenizer.apply_chat_template).parameters} - {"documents"} if template else set[str]()
    own = next((name for name in template or {} if name in settings), None)
    if own is not None:
        raise SmeltError(
            f"{own} is no variable of the model's chat template, but a setting of the tokenizer; leave it out"
        )
    try:
        written: Any = tokenizer.apply_chat_template(
            list(turns),
            tools=list(tools) if tools else None,
            add_generation_prompt=answer and not continue_last,
            continue_final_message=continue_last,
            sanitize_control_tokens=True,
            tokenize=True,
            return_dict=False,
            **(template or {}),
        )
    except Exception as error:  # anything that the template's code raises, including MemoryError
        raise SmeltError(f"the model's chat template refuses this conversation ({in_one_line(error)})") from None
    return [int(token) for token in written]
