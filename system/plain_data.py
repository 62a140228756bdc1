"""Plain data: what JSON and recipes hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def strings_in(data: Any) -> Iterator[str]:
    """All strings within mappings and lists, without the mappings' keys."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from strings_in(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from strings_in(value)


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can write, and UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
