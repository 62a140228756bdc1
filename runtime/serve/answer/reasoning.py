"""Reasoning before the answer, between tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .parts import Parser, Part, Reasoning
from .tags import find_tag

_NEWLINES = "\r\n"


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around reasoning."""

    opening: str
    closing: str


THINK = ReasoningTags("<think>", "</think>")
MISTRAL_THINK = ReasoningTags("[THINK]", "[/THINK]")


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()
    REST = auto()


class ReasoningParser:
    """Finds reasoning at the beginning of a text; another parser reads what follows it.

    Newlines at both ends of the reasoning, and before the rest, belong to the format and are dropped. Reasoning that is
    never closed is reasoning to its end, with the calls in it.

    Args:
        rest: parser of what follows, which is everything if there is no reasoning.
        is_open: the prompt ends with the opening tag; the model may repeat it.
        tags: around reasoning.
    """

    def __init__(self, rest: Parser, *, is_open: bool, tags: ReasoningTags = THINK) -> None:
        self._rest = rest
        self._is_open = is_open
        self._tags = tags
        self._place = _Place.BEFORE
        self._text = ""  # has come and is not used yet
        self._has_begun = False

    def add(self, text: str) -> list[Part]:
        """The parts that are known after ``text``."""
        if self._place is _Place.REST:
            return self._rest.add(text)
        self._text += text
        return self._read(is_last=False)

    def end(self) -> list[Part]:
        """The rest."""
        return [*self._read(is_last=True), *self._rest.end()]

    def _read(self, *, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        if self._place is _Place.BEFORE:
            self._begin(is_last=is_last)
        if self._place is _Place.INSIDE:
            parts += self._inside(is_last=is_last)
        if self._place is _Place.AFTER:
            self._text = self._text.lstrip(_NEWLINES)
            if self._text or is_last:
                self._place = _Place.REST
        if self._place is _Place.REST and self._text:
            text, self._text = self._text, ""
            parts += self._rest.add(text)
        return parts

    def _begin(self, *, is_last: bool) -> None:
        opening, text = self._tags.opening, self._text.lstrip()
        if text.startswith(opening):
            self._text = text[len(opening) :]
            self._place = _Place.INSIDE
        elif is_last or not opening.startswith(text):
            self._place = _Place.INSIDE if self._is_open else _Place.REST

    def _inside(self, *, is_last: bool) -> list[Part]:
        if not self._has_begun:
            self._text = self._text.lstrip(_NEWLINES)
        at, tag = find_tag(self._text, (self._tags.closing,), is_last=is_last)
        known = self._text[:at].rstrip(_NEWLINES)
        if tag:
            self._text = self._text[at + len(tag) :]
            self._place = _Place.AFTER
        else:
            self._text = "" if is_last else self._text[len(known) :]
        self._has_begun = self._has_begun or bool(known)
        return [Reasoning(known)] if known else []


def opens_reasoning(prompt: Sequence[int], opening: int, closing: int) -> bool:
    """Whether a prompt leaves reasoning open: of its tags, the last one opens it.

    Tokens are surer than text, which may be a user's: this is for tags that are tokens of their own.

    Args:
        prompt: its tokens.
        opening, closing: the tags' tokens.
    """
    last = next((token for token in reversed(prompt) if token in (opening, closing)), closing)
    return last == opening


def text_opens_reasoning(tail: str, tags: ReasoningTags = THINK) -> bool:
    """Whether a prompt leaves reasoning open, for tags of several tokens.

    Args:
        tail: what the template writes after the last message. Messages themselves may contain tags.
        tags: around reasoning.
    """
    return tail.rfind(tags.opening) > tail.rfind(tags.closing)
