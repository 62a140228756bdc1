"""What the parsers of tool calls have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .json_call import BareArguments, read_call
from .part_list import PartList
from .parts import Part
from .tags import find_tag

# A text that is read from many places on takes no longer than its length if little of it is there at a time.
_PIECE = 256


class CallParser(ABC):
    """Content, with calls in it.

    Text that is not a call is content, with its tags. A call that turns out not to be JSON is returned as it was
    generated: after the character that shows it, all up to the next tag of the format, or to the end, is its arguments.

    Args:
        found: to add to.
    """

    def __init__(self, found: PartList) -> None:
        self._found = found
        self._text = ""  # has come and is not used yet
        self._is_last = False
        self._call: BareArguments | None = None
        self._is_raw = False  # free text continues the last call's arguments

    def add(self, text: str) -> list[Part]:
        """The parts that are known after ``text``."""
        for start in range(0, len(text), _PIECE):
            self._text += text[start : start + _PIECE]
            self._read()
        return self._found.take()

    def end(self) -> list[Part]:
        """The rest."""
        self._is_last = True
        self._read()
        if self._call is not None:
            self._call.end()
        self._finish()
        self._found.end()
        return self._found.take()

    def _read(self) -> None:
        while self._text and self._step():
            pass

    @abstractmethod
    def _step(self) -> bool:
        """Use some of the text; False if that needs more."""

    def _finish(self) -> None:
        """What is left of the text becomes content."""
        self._free(self._text)

    def _free(self, text: str) -> None:
        """Text outside calls."""
        if self._is_raw:
            self._found.arguments(text)
        elif text:
            self._found.content(text)

    def _up_to_tag(self, tags: Sequence[str]) -> str:
        """Use the free text up to a tag, and return the tag; "" if there is none yet."""
        at, tag = find_tag(self._text, tags, is_last=self._is_last)
        self._free(self._text[:at])
        self._text = self._text[at:]
        if tag:
            self._is_raw = False
        return tag

    def _ends(self, call: BareArguments, tags: Sequence[str] = ()) -> bool:
        """Give a call its text, and return whether it is over."""
        self._text, is_over = read_call(call, self._text, tags, is_last=self._is_last)
        if is_over:
            call.end()
            self._is_raw = call.is_unfinished
            self._call = None
        return is_over
