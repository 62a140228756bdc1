"""Calls as Llama 3 and 4 write them: ``{"name": …, "parameters": {…}}``, several with semicolons between them."""

from __future__ import annotations

from collections.abc import Callable

from .call_parser import CallParser
from .ids import call_id
from .json_call import JsonCall
from .part_list import PartList

_TAG = "<|python_tag|>"


class Llama3JsonParser(CallParser):
    """vLLM's ``llama3_json``.

    Every brace may begin a call. An object without a name and parameters is content; so are the objects in it.

    Args:
        new_id: names each call.
    """

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        super().__init__(PartList(new_id, separators=";"))

    def _step(self) -> bool:
        if self._call is not None:
            return self._ends(self._call)
        tag = self._up_to_tag((_TAG,) if self._is_raw else (_TAG, "{"))
        if not tag:
            return False
        prefix = _TAG if tag == _TAG else ""
        self._text = self._text[len(prefix) :]
        self._call = JsonCall(self._found, prefix, ("parameters", "arguments"), needs_arguments=True)
        return True
