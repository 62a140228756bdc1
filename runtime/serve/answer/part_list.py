"""Parts that were found and wait to be handed out."""

from __future__ import annotations

from collections.abc import Callable

from .parts import CallArguments, CallStart, Content, Part

_SPACE = " \t\r\n"


class PartList:
    """Collects parts in order, numbers calls, and leaves out the space around them.

    Space next to a call belongs to the format: it is held back, and is content only if other content follows. So it is
    when there is nothing else. All other space is content.

    Args:
        new_id: names each call.
        separators: other characters that may stand between two calls.
    """

    def __init__(self, new_id: Callable[[], str], separators: str = "") -> None:
        self._new_id = new_id
        self._separators = separators
        self._parts: list[Part] = []
        self._calls = 0
        self._held = ""
        self._is_loose = True  # no content since the last call

    def content(self, text: str) -> None:
        """Text of the answer."""
        text = self._held + text
        kept = text.rstrip(_SPACE)
        # A separator is one only if nothing else stands between it and the call before.
        if self._is_loose and self._calls and not kept.strip(_SPACE + self._separators):
            kept = ""
        self._held = text[len(kept) :]
        if kept:
            self._parts.append(Content(kept))
            self._is_loose = False

    def start(self, name: str, id: str | None = None) -> None:
        """A call begins; its id is new unless the model gave one."""
        self._parts.append(CallStart(self._calls, self._new_id() if id is None else id, name))
        self._calls += 1
        self._held = self._held.translate({ord(character): None for character in self._separators})
        self._is_loose = True

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._parts.append(CallArguments(self._calls - 1, text))

    def end(self) -> None:
        """No part follows."""
        if self._held and not self._is_loose:
            self._parts.append(Content(self._held))
        self._held = ""

    def take(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts
