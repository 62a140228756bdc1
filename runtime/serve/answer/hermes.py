"""Calls as Hermes and Qwen 2.5 and 3 write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Callable

from .call_parser import CallParser
from .ids import call_id
from .json_call import JsonCall
from .part_list import PartList

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser(CallParser):
    """vLLM's ``hermes``.

    A tag ends a call wherever it is not inside a string, so the closing one may be missing. Space between a call's last
    brace and its closing tag is neither content nor arguments.

    Args:
        new_id: names each call.
    """

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        super().__init__(PartList(new_id))
        self._is_open = False  # the last call's closing tag has not come
        self._skips_space = False

    def _step(self) -> bool:
        call = self._call
        if call is not None:
            over = self._ends(call, (_OPEN, _CLOSE))
            self._is_open = over and call.has_begun
            self._skips_space = over and call.is_whole
            return over
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
        tag = self._up_to_tag((_OPEN, _CLOSE) if self._is_open else (_OPEN,))
        if not tag:
            return False
        self._text = self._text[len(tag) :]
        self._is_open = False
        if tag == _OPEN:
            self._call = JsonCall(self._found, _OPEN)
        return True
