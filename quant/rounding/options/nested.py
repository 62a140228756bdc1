"""Options of nested rounding."""

from __future__ import annotations

from pydantic import Field

from .base import RoundingOptions
from .gptq import MAX_DAMPING


class NestedOptions(RoundingOptions):
    """Options of nested rounding."""

    damping: float = Field(
        default=0.01, gt=0, le=MAX_DAMPING, description="Fraction of the Hessian's mean diagonal added to its diagonal."
    )
    give: float = Field(
        default=0.125,
        ge=0,
        le=1,
        description="How far a weight of 8 bits may be from the original for the sake of the upper four bits, in steps of 4 bits.",
    )
    sweeps: int = Field(
        default=2,
        ge=0,
        description="Sweeps of coordinate descent over the upper codes, and then over the lower ones; 0 for none.",
    )
    block: int = Field(
        default=256, ge=1, description="Columns between two updates of the whole weight; affects speed only."
    )

    @property
    def reads_inputs(self) -> bool:
        return True
