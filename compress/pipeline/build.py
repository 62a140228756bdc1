"""The steps that a recipe describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...distill.run.step import DistillStep
from ...models.steps.step import Step
from ...prune.steps.table import step_of
from ..recipe.recipe import Recipe
from ..steps.quantize import QuantizeStep

# By a step's name in the recipe: from its section and that section's name in messages to the step.
STEPS: dict[str, Callable[[Any, str], Step[Any]]] = {"quantize": QuantizeStep, "prune": step_of, "distill": DistillStep}


def steps_of(recipe: Recipe) -> list[Step[Any]]:
    """A recipe's steps."""
    return [
        STEPS[entry.step_name](entry.settings, f"steps.{number}.{entry.step_name}")
        for number, entry in enumerate(recipe.steps)
    ]
