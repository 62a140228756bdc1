"""The step that a recipe entry describes."""

from __future__ import annotations

from ...distill.run.step import DistillStep
from ...models.steps.step import RunContext, Step, StepRecord
from ...prune.steps.table import step_of
from ..recipe.recipe import StepEntry
from ..steps.quantize import QuantizeStep

# By a step's name in the recipe: from its section and that section's name in messages to the step.
STEPS = {"quantize": QuantizeStep, "prune": step_of, "distill": DistillStep}


def build(entry: StepEntry, number: int) -> Step:
    """The step that a recipe entry describes."""
    name = entry.step_name
    return STEPS[name](getattr(entry, name), f"steps.{number}.{name}")


__all__ = ["STEPS", "DistillStep", "QuantizeStep", "RunContext", "Step", "StepRecord", "build"]
