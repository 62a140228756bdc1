"""What ``truncation: auto`` leaves of a conversation that is too long for the model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from ...http.errors import ApiError
from ...model.chat_prompt import ChatOptions
from ...model.served_model import ServedModel


def newest_turns(
    turns: Sequence[dict[str, Any]], model: ServedModel, options: ChatOptions, wanted: int | None
) -> Sequence[dict[str, Any]]:
    """A conversation without its oldest turns, as many as do not fit.

    What a system says at the beginning stays, and the rest begins with a user's turn: templates refuse the outputs of tools that nobody called.
    If not even the last of these fits, it is there, and is refused as too long.

    Args:
        turns: the whole conversation.
        model: that answers.
        options: how.
        wanted: the most tokens of the answer; None for as many as there is room for.

    Raises:
        ApiError: the template refuses the conversation.
    """
    first = next((place for place, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    starts = [place for place in range(first, len(turns)) if place == first or turns[place]["role"] == "user"]
    tools = [tool.model_dump(exclude_none=True) for tool in options.offered]

    def kept(start: int) -> Sequence[dict[str, Any]]:
        return [*turns[:first], *turns[start:]]

    def fits(start: int) -> bool:
        try:
            length = len(model.conversation(kept(start), tools=tools, template=options.template))
        except ApiError as problem:
            if problem.code == "context_length_exceeded":
                return False
            raise
        return length + (wanted or 1) <= model.longest

    if len(starts) < 2:
        return turns
    # Where the last one alone is left, whether it fits is found out by whoever computes it.
    return kept(starts[bisect_left(starts, True, hi=len(starts) - 1, key=fits)])
