"""A JSON object that comes in pieces: its values as they are written, and where it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

_SPACE = " \t\r\n"
_CLOSES = {"{": "}", "[": "]"}
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_OF_SCALARS = frozenset("+-.0123456789Eaeflnrstu")


@dataclass
class ValueSpan:
    """Where a value is in the object's text; ``end`` is None until it is complete."""

    start: int
    end: int | None = None


class ObjectScan:
    """Reads an object character by character, so that its end does not depend on how the text is cut.

    The top level is read strictly, but for a comma after the last value. Within values only strings and brackets count:
    what a model gets wrong in them does not hide where they end.

    Attributes:
        text: of the object, as far as it has come, and space before it.
        values: of the top level, by key; of two with one key the first.
        is_ended: the last brace has come.
        is_broken: the text is no object; the character that shows it is not part of ``text``.
    """

    def __init__(self) -> None:
        self.text = ""
        self.values: dict[str, ValueSpan] = {}
        self.is_ended = False
        self.is_broken = False
        self._state: Callable[[int, str], None] = self._before
        self._after_string: Callable[[int], None] = self._end_value
        self._is_escaped = False
        self._has_newline = False
        self._from = 0
        self._key = ""
        self._value = ValueSpan(0)
        self._closing: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether no more text belongs to it."""
        return self.is_ended or self.is_broken

    @property
    def in_string(self) -> bool:
        """Whether the next character is surely inside a string: one with a newline in it may be one that was not closed."""
        return self._state == self._string and not self._has_newline

    def add(self, text: str) -> int:
        """Read on, and return how many characters of ``text`` belong to the object."""
        if self.is_over:
            return 0
        start = len(self.text)
        self.text += text
        for at in range(start, len(self.text)):
            self._state(at, self.text[at])
            if self.is_over:
                self.text = self.text[: at + self.is_ended]
                break
        return len(self.text) - start

    def _before(self, at: int, character: str) -> None:
        if character == "{":
            self._state = self._key_or_end
        elif character not in _SPACE:
            self.is_broken = True

    def _key_or_end(self, at: int, character: str) -> None:
        if character == '"':
            self._from = at
            self._begin_string(self._end_key)
        elif character == "}":
            self.is_ended = True
        elif character not in _SPACE:
            self.is_broken = True

    def _end_key(self, at: int) -> None:
        literal = self.text[self._from : at + 1]
        key = decoded(literal)
        self._key = literal if key is None else key
        self._state = self._colon

    def _colon(self, at: int, character: str) -> None:
        if character == ":":
            self._state = self._begin_value
        elif character not in _SPACE:
            self.is_broken = True

    def _begin_value(self, at: int, character: str) -> None:
        if character in _SPACE:
            return
        if character == '"':
            self._begin_string(self._end_value)
        elif character in _CLOSES:
            self._closing = [_CLOSES[character]]
            self._state = self._nested
        elif character in _OF_SCALARS:
            self._state = self._scalar
        else:
            self.is_broken = True
            return
        self._value = ValueSpan(at)
        self.values.setdefault(self._key, self._value)

    def _end_value(self, at: int) -> None:
        self._value.end = at + 1
        self._state = self._comma_or_end

    def _comma_or_end(self, at: int, character: str) -> None:
        if character == ",":
            self._state = self._key_or_end
        elif character == "}":
            self.is_ended = True
        elif character not in _SPACE:
            self.is_broken = True

    def _scalar(self, at: int, character: str) -> None:
        if character in _OF_SCALARS:
            return
        if not _SCALAR.fullmatch(self.text, self._value.start, at):
            self.is_broken = True
            return
        self._end_value(at - 1)
        self._comma_or_end(at, character)

    def _nested(self, at: int, character: str) -> None:
        if character == '"':
            self._begin_string(self._continue_nested)
        elif character in _CLOSES:
            self._closing.append(_CLOSES[character])
        elif character in "}]":
            self.is_broken = self._closing.pop() != character
            if not self._closing and not self.is_broken:
                self._end_value(at)

    def _continue_nested(self, at: int) -> None:
        self._state = self._nested

    def _begin_string(self, after: Callable[[int], None]) -> None:
        self._is_escaped = self._has_newline = False
        self._after_string = after
        self._state = self._string

    def _string(self, at: int, character: str) -> None:
        self._has_newline |= character == "\n"
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._after_string(at)


def decoded(literal: str) -> str | None:
    """The text that a JSON string stands for; None if it stands for none that can be sent on."""
    try:
        text = json.loads(literal, strict=False)
        if isinstance(text, str):
            # Half of a surrogate pair cannot be written as UTF-8.
            text.encode()
            return text
    except ValueError:
        pass
    return None


def is_object(text: str) -> bool:
    """Whether it is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
