"""``/v1/messages/count_tokens``."""

from __future__ import annotations

from ...requests.params import SamplingParams
from ..model.served_model import ServedModel
from .conversation import prompt_of
from .fields import ConversationRequest


class CountRequest(ConversationRequest):
    """The body."""


async def counted(request: CountRequest, model: ServedModel) -> dict[str, int]:
    """The number of tokens of the prompt that the same fields make at ``/v1/messages``.

    Raises:
        ApiError: they would be refused there.
    """
    return {"input_tokens": len((await prompt_of(request, model, SamplingParams())).tokens)}
