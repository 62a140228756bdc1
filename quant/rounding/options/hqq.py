"""Options of HQQ."""

from __future__ import annotations

from pydantic import Field

from .base import RoundingOptions


class HqqOptions(RoundingOptions):
    """Options of HQQ; the defaults are its authors'."""

    lp_norm: float = Field(
        default=0.7, gt=0, le=1, description="p of the norm that is minimised; below 1 it is robust to outliers."
    )
    beta: float = Field(default=10.0, gt=0, description="Weight of the quadratic term at the first iteration.")
    kappa: float = Field(default=1.01, ge=1, description="Growth of beta per iteration.")
    iterations: int = Field(
        default=20, ge=1, description="Maximum iterations; a row stops when its error stops falling."
    )
