"""The items that an answer consists of."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["in_progress", "completed", "incomplete"]


def _new(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


@dataclass
class AnswerItem:
    """Text for the user.

    Attributes:
        id: its name.
        text: so far.
        logprobs: of the text's tokens, if requested.
    """

    id: str = field(default_factory=lambda: _new("msg"))
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def form(self, status: Status) -> dict[str, Any]:
        """As it is in a response."""
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self) -> dict[str, Any]:
        """Its content."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self.logprobs]}


@dataclass
class Thought:
    """Reasoning.

    Attributes:
        id: its name.
        text: so far.
    """

    id: str = field(default_factory=lambda: _new("rs"))
    text: str = ""

    def form(self, status: Status) -> dict[str, Any]:
        """As it is in a response."""
        content = {} if status == "in_progress" else {"content": [self.part()]}
        return {"id": self.id, "type": "reasoning", "summary": [], **content, "status": status}

    def part(self) -> dict[str, Any]:
        """Its content."""
        return {"type": "reasoning_text", "text": self.text}


@dataclass
class Call:
    """A call of a function.

    Attributes:
        call_id: by which its output refers to it.
        name: of the function.
        id: its name.
        text: the arguments so far, as JSON.
    """

    call_id: str
    name: str
    id: str = field(default_factory=lambda: _new("fc"))
    text: str = ""

    def form(self, status: Status) -> dict[str, Any]:
        """As it is in a response."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }


OutputItem = AnswerItem | Thought | Call
