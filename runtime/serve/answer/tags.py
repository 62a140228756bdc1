"""Tags in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_tag(text: str, tags: Sequence[str], *, is_last: bool = False) -> tuple[int, str]:
    """The first tag in a text.

    Args:
        text: what has come.
        tags: to look for; none is part of another.
        is_last: no text follows.

    Returns:
        Where it is, and which. If there is none: where the text's end may be the beginning of one, or its length, and "".
    """
    found = min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)
    if found is not None:
        return found
    if not is_last:
        for size in range(min(len(text), max(map(len, tags), default=1) - 1), 0, -1):
            if any(tag.startswith(text[-size:]) for tag in tags):
                return len(text) - size, ""
    return len(text), ""
