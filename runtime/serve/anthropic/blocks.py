"""An answer's parts as content blocks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from ..answer.parts import CallArguments, CallStart, Content, Part, Reasoning

Event = dict[str, Any]
_OPENAI_ID = "call_"


class ContentBlocks:
    """Content blocks as they grow, and the events of their growth.

    Args:
        shows_thinking: otherwise its blocks are empty.

    Attributes:
        content: the blocks so far.
        has_calls: whether a tool is called.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._is_open = False
        self._arguments = ""
        self.content: list[dict[str, Any]] = []
        self.has_calls = False

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """Append parts."""
        return [event for part in parts for event in self._grown(part)]

    def end(self) -> list[Event]:
        """No part follows."""
        return list(self._close())

    def _grown(self, part: Part) -> Iterator[Event]:
        match part:
            case Content(text) if text:
                yield from self._open({"type": "text", "text": ""})
                self.content[-1]["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text) if text:
                yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                if self._shows_thinking:
                    self.content[-1]["thinking"] += text
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(_, id, name):
                yield from self._close()
                yield from self._open({"type": "tool_use", "id": _tool_use_id(id), "name": name, "input": {}})
                self._arguments = ""
                self.has_calls = True
            case CallArguments(_, text) if text:
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case _:
                pass

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block, unless the last one is of its type."""
        if self._is_open and self.content[-1]["type"] == block["type"]:
            return
        yield from self._close()
        self.content.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        block = self.content[-1]
        if block["type"] == "thinking":
            # Anthropic's clients require one, and send it back. Nothing is signed here.
            block["signature"] = secrets.token_hex(32)
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _delta(self, change: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": change}


def _tool_use_id(call: str) -> str:
    # Names in the model's own form stay: its template accepts no others when they are sent back.
    return f"toolu_{call.removeprefix(_OPENAI_ID)}" if call.startswith(_OPENAI_ID) else call


def _input(arguments: str) -> dict[str, Any]:
    """The arguments, as far as they came. What is no JSON comes in the object that Anthropic's documentation has for it."""
    try:
        found = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
        json.dumps(found, allow_nan=False)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    return {"INVALID_JSON": arguments}
