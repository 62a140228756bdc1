"""Calls as Mistral's models write them, in all versions of their format.

- ``[TOOL_CALLS] [{"name": "add", "arguments": {…}}, …]``, also without the outer brackets
- ``[TOOL_CALLS]add{…}[TOOL_CALLS]multiply{…}``
- ``[TOOL_CALLS]add[ARGS]{…}``
- ``[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{…}``
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .call_parser import CallParser
from .ids import is_mistral_id, mistral_id
from .json_call import BareArguments, JsonCall
from .part_list import PartList
from .tags import find_tag

_TAG = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_SPACE = " \t\r\n"
_WORD = re.compile(r"[^\s\[\]{}\"]{0,256}")
_KEYS = ("arguments", "parameters")


class MistralParser(CallParser):
    """vLLM's ``mistral``.

    A name without arguments is a call when another call follows it. At the end of the text it may have been cut off
    anywhere, and is content.

    Args:
        new_id: names each call that the model does not name with ``[CALL_ID]``.
    """

    def __init__(self, new_id: Callable[[], str] = mistral_id) -> None:
        super().__init__(PartList(new_id))
        self._state = self._in_free
        self._held = ""  # content, unless calls follow

    def _step(self) -> bool:
        return self._state()

    def _finish(self) -> None:
        self._free((self._held if self._held.startswith(_TAG) else "") + self._text)

    def _in_free(self) -> bool:
        if not self._up_to_tag((_TAG,)):
            return False
        self._text = self._text[len(_TAG) :]
        self._held = _TAG
        self._state = self._in_head
        return True

    def _in_head(self) -> bool:
        """After a tag, before the arguments."""
        at, tag = find_tag(self._text, (_TAG,), is_last=self._is_last)
        rest = self._text.lstrip(_SPACE)
        # An array's bracket may also begin the next tag.
        is_array = rest.startswith("[") and rest[1:2] not in ("", _TAG[1])
        if is_array or rest.startswith("{"):
            size = len(self._text) - len(rest) + is_array
            self._held += self._text[:size]
            self._text = self._text[size:]
            self._state = self._in_array
            if not is_array:
                self._call = JsonCall(self._found, self._held, _KEYS)
                self._held = ""
                self._state = self._in_single
            return True
        head = _Head.of(self._text[:at])
        if head is not None and head.is_complete:
            self._found.start(head.name, head.id)
            self._text = self._text[head.size :]
            self._call = BareArguments(self._found)
            self._state = self._in_single
        elif head is not None and head.size and tag:
            self._found.start(head.name, head.id)
            self._found.arguments("{}")
            self._text = self._text[at:]
            self._state = self._in_free
        elif head is not None and not tag:
            return False
        else:
            self._free(self._held)
            self._state = self._in_free
        self._held = ""
        return True

    def _in_single(self) -> bool:
        return self._reads(self._in_free)

    def _in_element(self) -> bool:
        return self._reads(self._in_array)

    def _reads(self, after: Callable[[], bool]) -> bool:
        """Read the open call; ``after`` follows if it is whole."""
        call = self._call
        assert call is not None
        if not self._ends(call, (_TAG,)):
            return False
        self._state = after if call.is_whole else self._in_free
        return True

    def _in_array(self) -> bool:
        """Between an array's elements."""
        rest = self._text.lstrip(_SPACE + ",")
        self._held += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if not rest:
            return False
        if rest.startswith("{"):
            self._call = JsonCall(self._found, self._held, _KEYS)
            self._state = self._in_element
        else:
            is_end = rest.startswith("]") and not self._held.startswith(_TAG)
            if is_end:
                self._text = rest[1:]
            else:
                self._free(self._held)
            self._state = self._in_free
        self._held = ""
        return True


@dataclass
class _Head:
    """What stands between a tag and the arguments.

    Attributes:
        name: "" if it has not begun.
        id: the model's own, if it is a proper one.
        size: how many characters it has; 0 while it ends within a name or a tag.
        is_complete: the arguments follow.
    """

    name: str = ""
    id: str | None = None
    size: int = 0
    is_complete: bool = False

    @classmethod
    def of(cls, text: str) -> _Head | None:
        """Of the text after a tag, as far as it has come; None if it is none."""
        head = cls()
        rest = text.lstrip(_SPACE)
        if not rest:
            return head
        head.name, rest = _word(rest)
        if not head.name:
            return None
        for tag in (_ID, _ARGUMENTS):
            if 0 < len(rest) < len(tag) and tag.startswith(rest):
                return head
            if rest.startswith(tag):
                rest = rest[len(tag) :].lstrip(_SPACE)
                if tag == _ID:
                    word, rest = _word(rest)
                    head.id = word if is_mistral_id(word) else None
        if rest and not rest.startswith("{"):
            return None
        head.size = len(text) - len(rest)
        head.is_complete = bool(rest)
        return head


def _word(text: str) -> tuple[str, str]:
    """The word at the beginning, and what follows the space after it."""
    match = _WORD.match(text)
    assert match is not None
    return match.group(), text[match.end() :].lstrip(_SPACE)
