"""Recipes that tests of training share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from smelt.compress import Recipe

from .small import TRAINING, Make


@pytest.fixture
def distilled(tmp_path: Path) -> Make:
    """``distilled(model, {"prune": …}, loss=…)``: a small recipe of some steps, then a distill step with changes."""

    def build(
        model: Path | str, *before: dict[str, Any], after: list[dict[str, Any]] | None = None, **changes: Any
    ) -> Recipe:
        return Recipe.model_validate(
            {
                "model": str(model),
                "output": str(tmp_path / "out"),
                "calibrate": {"samples": 4, "length": 32},
                "evaluate": {"windows": 4, "length": 32, "samples": 0, "speed": False},
                "steps": [*before, {"distill": {**TRAINING, **changes}}, *(after or [])],
            }
        )

    return build


@pytest.fixture
def few_words(tmp_path: Path) -> str:
    """A text of five windows, which even random weights learn in a moment."""
    path = tmp_path / "few.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and a miller grinds 200 sacks of rye. " * 6)
    return str(path)
