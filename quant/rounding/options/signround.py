"""Options of SignRound."""

from __future__ import annotations

from pydantic import Field

from .base import RoundingOptions


class SignroundOptions(RoundingOptions):
    """Options of SignRound."""

    iterations: int = Field(default=200, ge=1, description="Steps of signed gradient descent per block.")
    batch: int = Field(default=8, ge=1, description="Calibration windows per step.")
    learning_rate: float | None = Field(
        default=None, gt=0, description="Initial learning rate, which falls linearly to 0; default: 1 / iterations."
    )
    learn_clipping: bool = Field(default=True, description="Also learn each group's clipping range.")
    least_clip: float = Field(
        default=0.0, ge=0, lt=1, description="Smallest range that a group can learn, as a fraction of its full range."
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Random seed of the order of windows.")

    @property
    def reads_inputs(self) -> bool:
        return True
