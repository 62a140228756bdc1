"""Options of SignRound."""

from __future__ import annotations

from pydantic import Field

from .base import RoundingOptions


class SignroundOptions(RoundingOptions):
    """Options of SignRound."""

    iterations: int = Field(default=200, ge=1, description="Steps of signed gradient descent for each block.")
    batch: int = Field(default=8, ge=1, description="Calibration windows a step.")
    learning_rate: float | None = Field(
        default=None, gt=0, description="Of the first step; it falls linearly to 0. By default 1 / iterations."
    )
    learn_clipping: bool = Field(default=True, description="Learn each group's range beside the rounding.")
    least_clip: float = Field(
        default=0.0, ge=0, lt=1, description="The share of its extremes below which no group's range shrinks."
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Of the order in which windows are drawn.")

    @property
    def reads_inputs(self) -> bool:
        return True
