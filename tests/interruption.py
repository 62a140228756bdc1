"""Interrupting a run where a part has just been finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from smelt.models.steps import block_loop


def note_parts(monkeypatch: pytest.MonkeyPatch, interrupt_at: int) -> list[str]:
    """The names of the parts that runs write from now on; after so many of them there is one interrupt."""
    original, names = block_loop.save_part, list[str]()

    def save(*args: Any) -> None:
        original(*args)
        names.append(args[0].name)
        if len(names) == interrupt_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(block_loop, "save_part", save)
    return names


def interrupt_after(parts: int, monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]) -> None:
    """Start a run and interrupt it once so many parts are written."""
    with monkeypatch.context() as patch:
        note_parts(patch, parts)
        with pytest.raises(KeyboardInterrupt):
            start()
