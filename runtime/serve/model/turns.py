"""Parts of a conversation's turns that several APIs have."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any


def called(id: str | None, name: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """A call of a tool as chat templates expect it: its arguments are an object.

    Clients send back what the model wrote, with a tool's complaint about it. What is not JSON, because the model erred or ``max_tokens`` cut it, stays
    the text that it is.

    Args:
        id: of the call.
        name: of the tool.
        arguments: as the client sent them; none are an empty object.
    """
    found: Any = arguments or {}
    if isinstance(found, str):
        with suppress(ValueError, RecursionError):  # not JSON, or too long or too deep for Python
            found = json.loads(found)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": found}}
