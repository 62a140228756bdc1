"""``/v1/embeddings``."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from ..http.errors import ApiError, too_long
from ..model.served_model import ServedModel
from .fields import Fields, TextsOrTokens, TruncateTokens, last_tokens

_MOST_INPUTS = 2048


class EmbeddingRequest(Fields):
    """The body; ``pooling`` is Smelt's."""

    model: str | None = None
    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    pooling: Literal["last", "mean"] = "last"
    add_special_tokens: bool = True
    truncate_prompt_tokens: TruncateTokens | None = None


async def embeddings(request: EmbeddingRequest, model: ServedModel) -> dict[str, Any]:
    """The response.

    Raises:
        ApiError: an input is empty or too long, or ``dimensions`` is asked for.
    """
    if request.dimensions is not None and request.dimensions != model.engine.model.spec.hidden:
        raise ApiError(
            400, f"This model's embeddings have {model.engine.model.spec.hidden} dimensions and cannot be shortened.",
            param="dimensions",
        )  # fmt: skip
    given = request.input
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not inputs or len(inputs) > _MOST_INPUTS or not all(inputs):
        raise ApiError(400, f"input needs from 1 to {_MOST_INPUTS} texts, none of them empty.", param="input")
    prompts = [
        model.encode(each, add_special_tokens=request.add_special_tokens) if isinstance(each, str) else list(each)  # type: ignore[arg-type]
        for each in inputs
    ]
    prompts = [last_tokens(each, request.truncate_prompt_tokens, model.longest) for each in prompts]
    longest = max(prompts, key=len)
    if len(longest) > model.longest:
        raise too_long(len(longest), None, model.longest)
    found = []
    for prompt in prompts:
        async with model.embeds:
            found.append(await model.engine.embed(prompt, pooling=request.pooling, adapter=model.adapter))
    total = sum(map(len, prompts))
    return {
        "object": "list",
        "model": model.name,
        "data": _entries(found, request.encoding_format),
        "usage": {"prompt_tokens": total, "total_tokens": total},
    }


def _entries(found: list[torch.Tensor], form: str) -> list[dict[str, Any]]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": each.tolist() if form == "float" else base64.b64encode(each.numpy().tobytes()).decode(),
        }
        for index, each in enumerate(found)
    ]
