"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

from typing import Any

from ..http.errors import ApiError
from ..model.chat_prompt import Tool
from ..model.served_model import ServedModel
from .fields import Fields
from .messages import ChatMessage, turns_of


class TokenizeRequest(Fields):
    """A prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """Tokens."""

    model: str | None = None
    tokens: list[int]


def tokenized(request: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The tokens of a prompt, or of a conversation as the template writes it.

    Raises:
        ApiError: there is neither, or both.
    """
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "Give prompt or messages.", param="prompt")
    if request.messages is None:
        tokens = model.encode(request.prompt or "", add_special_tokens=request.add_special_tokens)
    else:
        tokens = model.conversation(
            turns_of(request.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in request.tools or []],
            answer=request.add_generation_prompt,
            continue_last=request.continue_final_message,
            template=request.chat_template_kwargs,
        )
    texts = model.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.longest, "tokens": tokens, "token_strs": texts}


def detokenized(request: DetokenizeRequest, model: ServedModel) -> dict[str, str]:
    """The text of tokens, special ones too.

    Raises:
        ApiError: they are more than the model's context can hold, for which others would wait.
    """
    if len(request.tokens) > model.longest:
        raise ApiError(
            400, f"There are {len(request.tokens):,} tokens; give at most {model.longest:,}.", param="tokens"
        )
    return {"prompt": model.decode(request.tokens, skip_special_tokens=False)}
