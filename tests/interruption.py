"""Interrupting a run where a part has just been finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from smelt.models.steps import block_loop


def interrupt_after(parts: int, monkeypatch: pytest.MonkeyPatch, start: Callable[[], object]) -> None:
    """Start a run and interrupt it once so many parts are written."""
    original, count = block_loop.save_part, [0]

    def stop(*args: Any) -> None:
        original(*args)
        count[0] += 1
        if count[0] == parts:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(block_loop, "save_part", stop)
        with pytest.raises(KeyboardInterrupt):
            start()
