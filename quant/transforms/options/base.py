"""Options common to all transforms, which are also those of transforms without options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TransformOptions(BaseModel):
    """Base of every transform's options: strict, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def reads_inputs(self) -> bool:
        """Whether the transform needs layers' inputs on the calibration text."""
        return False

    @property
    def learning_steps(self) -> int:
        """Steps of learning a rotation on the calibration text."""
        return 0

    def seed_in(self, run: int) -> int:
        """The random seed, given the run's."""
        return run
