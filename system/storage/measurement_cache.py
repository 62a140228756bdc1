"""Results of long measurements, kept in the user's cache directory and shared between runs."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..hardware.machine import cache_directory
from .digests import digest


class Kept:
    """A result that is measured once.

    Args:
        kind: what it is; the beginning of the file's name.
        decided_by: everything that decides the result, as plain data.
        directory: where it is kept; ``$XDG_CACHE_HOME/smelt`` (``~/.cache/smelt``) by default.
    """

    def __init__(self, kind: str, decided_by: dict[str, Any], directory: Path | None = None) -> None:
        self._decided_by = decided_by
        self._path = (directory or cache_directory()) / f"{kind}-{digest(decided_by)[:32]}.json"

    def read(self) -> Any | None:
        """The result; None if there is none, or if something that decides it has changed."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["decided_by"] == json.loads(json.dumps(self._decided_by)):
                return found["result"]
        return None

    def write(self, result: Any) -> None:
        """Keep a result. Where the directory cannot be written, it is measured again the next time."""
        text = json.dumps({"decided_by": self._decided_by, "result": result}, indent=1) + "\n"
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Under a name of its own first: other runs may keep the same result at the same time.
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, suffix=".partial", delete=False) as file:
                file.write(text)
            os.replace(file.name, self._path)
