"""The recipe around the steps that are tested here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.compress import Recipe


def recipe_of(model: Path, output: Path, *steps: dict[str, Any], **fields: Any) -> Recipe:
    """A recipe with little text and no evaluation; ``fields`` replace those at its top."""
    data = {
        "model": str(model),
        "output": str(output),
        "calibrate": {"samples": 4, "length": 32},
        "evaluate": False,
        "steps": list(steps),
    }
    return Recipe.model_validate(data | fields)
