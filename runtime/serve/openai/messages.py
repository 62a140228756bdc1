"""A chat's messages, and how a template needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ..http.errors import ApiError
from ..model.turns import called


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class OtherPart(BaseModel):
    """A part that is no text; it is refused."""

    type: str


class CalledFunction(BaseModel):
    """A tool and its arguments, as JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """A call that the model has made."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message; what Smelt answers can be sent back as it is. Clients add fields of their own, which are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[str | TextPart | OtherPart, Field(union_mode="left_to_right")]] | None = Field(
        default=None, union_mode="left_to_right"
    )
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None


def turns_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them: contents are text, and arguments are objects.

    Raises:
        ApiError: a part is no text.
    """
    turns = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        # Templates know no developer.
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": _text(message, where)}
        for name in ("name", "tool_call_id"):
            if getattr(message, name) is not None:
                turn[name] = getattr(message, name)
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            turn["reasoning_content"] = reasoning
        if message.tool_calls:
            turn["tool_calls"] = [
                called(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
            ]
        turns.append(turn)
    return turns


def _text(message: ChatMessage, where: str) -> str:
    if message.content is None:
        if message.role not in ("assistant", "tool"):
            raise ApiError(400, f"{where} has no content.", param=f"{where}.content")
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if isinstance(part, OtherPart):
            raise ApiError(
                400, f"{where} has a part of type {part.type!r}; this server takes text only.", param=f"{where}.content"
            )
        texts.append(part.text or part.refusal or "")
    return "\n".join(texts)
