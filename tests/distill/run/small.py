"""Small recipes of training, and what their runs say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smelt.compress import Recipe
from smelt.compress.pipeline.plan import Plan

TRAINING = {"tokens": 8 * 4 * 32, "length": 32, "batch": 4, "learning_rate": 2e-3}
Make = Callable[..., Recipe]


def training_of(out: Path, step: int = 0) -> dict[str, Any]:
    return json.loads((out / "checkpoint" / "smelt.json").read_text())["steps"][step]["training"]


def losses_of(out: Path, step: int = 0) -> list[float]:
    """Of the steps of training; what was measured before them has none."""
    return [point["loss"] for point in training_of(out, step)["curve"] if point["step"]]


def problems_of(recipe: Recipe) -> str:
    return "\n".join(str(problem) for problem in Plan.make(recipe).problems)
