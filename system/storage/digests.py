"""SHA-256 of plain data and of files, by which work is recognised that was done before."""

from __future__ import annotations

import functools
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import SmeltError
from ..plain_data import strings_in
from .paths import named_path

_BEGINNING = 256 << 20


def digest(data: Any) -> str:
    """A digest of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes; not read again while the file is the same."""
    found = path.stat()
    return _digest_of(path, found.st_size, found.st_mtime_ns, found.st_ino)


def named_files(data: Any) -> dict[str, str]:
    """Digests of the files that settings name by a path or with an ending: texts, and definitions of tasks.

    Of a large one its beginning is hashed, which is what is read of a text.
    """
    found = {}
    for text in strings_in(data):
        with suppress(OSError, SmeltError):  # most name no file
            path = named_path(text)
            if ("/" in text or path.suffix) and path.is_file():
                found[text] = _beginning(path)
    return found


def _beginning(path: Path) -> str:
    with path.open("rb") as stream:
        found = hashlib.sha256(str(path.stat().st_size).encode())
        for _ in range(_BEGINNING >> 20):
            found.update(stream.read(1 << 20))
        return found.hexdigest()


@functools.lru_cache(maxsize=4096)
def _digest_of(path: Path, *_: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
