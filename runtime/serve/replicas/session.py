"""Which requests belong together: those of one session share a replica, and so the prefix in its cache."""

from __future__ import annotations

import hashlib
import json
from typing import Any

HEADER = b"x-session-id"
# Of a prompt without turns: short, so that the first of a session has them all, and long enough to tell sessions apart.
_CHARACTERS = 256
_TOKENS = 64


def session_key(header: bytes | None, body: bytes) -> str | None:
    """What a request shares with others of its session; None if that is not known.

    Without the header it is the beginning of the conversation, up to the first turn of its user: later turns repeat it, and
    different users differ in it, even where all have the same system prompt.

    Args:
        header: of :data:`HEADER`.
        body: of the request.
    """
    if header:
        return hashlib.sha256(header).hexdigest()
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    beginning = _beginning(data) if isinstance(data, dict) else None
    if not beginning:
        return None
    return hashlib.sha256(json.dumps([data.get("model"), beginning]).encode()).hexdigest()


def _beginning(data: dict[str, Any]) -> Any:
    for name in ("messages", "input", "prompt"):
        if name in data:
            return _first([data.get("system"), data.get("instructions")], data[name])
    return None


def _first(system: list[Any], given: Any) -> Any:
    if isinstance(given, str):
        return [*system, given[:_CHARACTERS]]
    if not isinstance(given, list) or not given:
        return None
    if isinstance(given[0], int):
        return given[:_TOKENS]
    if not isinstance(given[0], dict):
        return _first(system, given[0])
    turns = []
    for turn in given:
        turns.append(turn)
        if isinstance(turn, dict) and turn.get("role") == "user":
            break
    return [*system, *turns]
