"""Options of rotating the residual stream."""

from __future__ import annotations

from pydantic import Field

from .base import TransformOptions


class RotateOptions(TransformOptions):
    """Options of rotating the residual stream (QuaRot: Ashkboos et al., 2024, arXiv:2404.00456)."""

    learn: int = Field(
        default=0,
        ge=0,
        description="Steps of learning the rotations from the linears' inputs on the calibration text; 0 for random ones.",
    )
    heads: bool = Field(default=True, description="Also rotate within the value heads.")
    seed: int | None = Field(
        default=None, ge=0, le=2**32 - 1, description="Random seed of the signs; default: the run's seed."
    )

    @property
    def reads_inputs(self) -> bool:
        return self.learn > 0

    @property
    def learning_steps(self) -> int:
        return self.learn

    def seed_in(self, run: int) -> int:
        return run if self.seed is None else self.seed
