"""A conversation as a model's own template writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...system.errors import SmeltError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def conversation_text(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, str]], *, continue_last: bool = False
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
            list(turns), tokenize=False, add_generation_prompt=not continue_last, continue_final_message=continue_last
        )
    except Exception as error:  # anything that the template's code raises, including MemoryError
        first = " ".join(str(error).split())[:200] or type(error).__name__
        raise SmeltError(
            f"the model's chat template fails on this conversation ({first}); fix chat_template in its tokenizer files"
        ) from None
    return written
