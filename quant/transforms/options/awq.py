"""Options of AWQ."""

from __future__ import annotations

from pydantic import Field

from .base import TransformOptions


class AwqOptions(TransformOptions):
    """Options of AWQ's scaling."""

    steps: int = Field(default=20, ge=1, description="Number of exponents tried between 0 and 1.")
    weigh_columns: bool | None = Field(
        default=None,
        description="Also divide by the columns' mean magnitude to the power of one minus the exponent, as later versions"
        " do. By default both are tried.",
    )
    clip: bool = Field(default=True, description="Also clip extremes where that lowers the error, as `clip` does.")

    @property
    def reads_inputs(self) -> bool:
        return True
