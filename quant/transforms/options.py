"""The options of every transform, which recipes check without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TransformOptions(BaseModel):
    """Base of every transform's options: strict, and refusing what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def reads_inputs(self) -> bool:
        """Whether the transform asks what layers read of a calibration text."""
        return False


class AwqOptions(TransformOptions):
    """Options of AWQ's scaling."""

    steps: int = Field(default=20, ge=1, description="Exponents that are tried between 0 and 1.")
    weigh_columns: bool | None = Field(
        default=None,
        description="Divide by the columns' mean magnitude to the rest of the exponent, as later versions do. By default"
        " both are tried.",
    )
    clip: bool = Field(default=True, description="Also cut off extremes where that lowers the error, as `clip` does.")

    @property
    def reads_inputs(self) -> bool:
        return True


class ClipOptions(TransformOptions):
    """Options of clipping."""

    least: float = Field(default=0.5, gt=0, lt=1, description="The smallest share of a group's range that is tried.")
    steps: int = Field(default=10, ge=1, description="How many shares are tried.")

    @property
    def reads_inputs(self) -> bool:
        return True


class EqualizeOptions(TransformOptions):
    """Equalisation has nothing to choose."""


class SmoothOptions(TransformOptions):
    """Options of SmoothQuant."""

    strength: float = Field(
        default=0.5, ge=0, le=1, description="How much of the inputs' range moves to the weights; the paper's alpha."
    )

    @property
    def reads_inputs(self) -> bool:
        return True


class FoldNormsOptions(TransformOptions):
    """Norms' gains are multiplied into the linears that read them; there is nothing to choose."""


class RotateOptions(TransformOptions):
    """Options of rotating the residual stream (QuaRot: Ashkboos et al., 2024, arXiv:2404.00456)."""

    learn: int = Field(
        default=0,
        ge=0,
        description="Steps of learning the rotations from what the linears read of the calibration text; 0 for random ones.",
    )
    heads: bool = Field(default=True, description="Also rotate within the value heads.")
    seed: int | None = Field(
        default=None, ge=0, le=2**32 - 1, description="Chooses the signs; absent for the run's own seed."
    )

    @property
    def reads_inputs(self) -> bool:
        return self.learn > 0
