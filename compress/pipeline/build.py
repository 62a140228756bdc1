"""The step that a recipe entry describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...distill.run.step import DistillStep
from ...models.steps.step import RunContext, Step, StepRecord
from ...prune.steps.table import step_of
from ..recipe.recipe import Recipe, StepEntry
from ..steps.quantize import QuantizeStep

# By a step's name in the recipe: from its section and that section's name in messages to the step.
STEPS: dict[str, Callable[[Any, str], Step[Any]]] = {"quantize": QuantizeStep, "prune": step_of, "distill": DistillStep}


def build(entry: StepEntry, number: int) -> Step[Any]:
    """The step that a recipe entry describes."""
    name = entry.step_name
    return STEPS[name](entry.settings, f"steps.{number}.{name}")


def steps_of(recipe: Recipe) -> list[Step[Any]]:
    """A recipe's steps."""
    return [build(entry, number) for number, entry in enumerate(recipe.steps)]


__all__ = ["STEPS", "DistillStep", "QuantizeStep", "RunContext", "Step", "StepRecord", "build", "steps_of"]
