"""How calls are written in each format, as data for a grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_NAME = "NAME"
_ARRAY = re.compile(r"\[TOOL_CALLS\]\s*\[")


@dataclass(frozen=True)
class CallFormat:
    """The text around the arguments of calls: ``first``, calls with separators between them, ``last``.

    A call is what :meth:`before` returns, its arguments as JSON, and ``end``. A tag in these texts that is a special
    token of the model has to be written into a grammar as that token.

    Attributes:
        begin: before a call's arguments, with ``NAME`` for the tool's name.
        end: after them.
        separator: between two calls.
        first: before the first call.
        last: after the last.
        trigger: the beginning of ``first``, or else of ``begin``, by which a call in free text is known.
    """

    begin: str
    end: str
    separator: str = ""
    first: str = ""
    last: str = ""
    trigger: str = "[TOOL_CALLS]"

    def before(self, tool: str) -> str:
        """The text before the arguments of a call of a tool."""
        # The name stands in a JSON string, or is one that needs no escapes.
        return self.begin.replace(_NAME, json.dumps(tool, ensure_ascii=False)[1:-1], 1)


HERMES = CallFormat('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>")
LLAMA3_JSON = CallFormat('{"name": "NAME", "parameters": ', "}", "; ", trigger='{"name": "')
MISTRAL_ARRAY = CallFormat('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]")
MISTRAL_NAMES = CallFormat("[TOOL_CALLS]NAME", "")
MISTRAL_ARGS = CallFormat("[TOOL_CALLS]NAME[ARGS]", "")

_FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}


def call_format(parser: str, chat_template: str) -> CallFormat:
    """The format that a model was trained on.

    Args:
        parser: its name in ``PARSERS``.
        chat_template: of the model; Mistral's format has versions that only it shows.
    """
    if parser != "mistral":
        return _FORMATS[parser]
    if "[ARGS]" in chat_template:
        return MISTRAL_ARGS
    return MISTRAL_ARRAY if _ARRAY.search(chat_template) else MISTRAL_NAMES
