"""Finished measurements, kept on disk so that an interrupted evaluation continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...system.storage.digests import digest
from ...system.storage.files import write_text


class Journal:
    """A directory of measurements, each under a digest of everything that decides it.

    Args:
        directory: where; created when something is kept.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, key: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """The measurement kept under ``key``, or a new one; plain data."""
        path = self._directory / f"{digest(key)[:24]}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))["found"]
        except (FileNotFoundError, ValueError, KeyError):  # never measured, or damaged
            pass
        found = measure()
        self._directory.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"key": key, "found": found}) + "\n")
        return found
