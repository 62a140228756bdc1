"""What a recipe's steps do. The pipeline knows only the Step protocol."""

from __future__ import annotations

from ..recipe import StepEntry
from .quantize import QuantizeStep
from .step import RunContext, Step, StepRecord


def build(entry: StepEntry, number: int) -> Step:
    """The step that a recipe entry describes."""
    return QuantizeStep(entry.quantize, f"steps.{number}.quantize")


__all__ = ["RunContext", "Step", "StepRecord", "build"]
