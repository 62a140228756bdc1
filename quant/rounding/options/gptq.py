"""Options of GPTQ."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from ...pattern import Pattern
from .base import RoundingOptions

MAX_DAMPING = 1.0
# Columns per mask decision without a pattern, as in the SparseGPT paper.
AT_A_TIME = 128


class GptqOptions(RoundingOptions):
    """Options of GPTQ."""

    damping: float = Field(
        default=0.01, gt=0, le=MAX_DAMPING, description="Fraction of the Hessian's mean diagonal added to its diagonal."
    )
    activation_order: bool = Field(
        default=True, description="Round the columns with the largest inputs first. Scales stay in the stored order."
    )
    scale_search: bool = Field(
        default=True,
        description="Search each group's scale where that lowers its error weighted by input energy (symmetric integers).",
    )
    error_aware: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of the error in its inputs that a layer compensates for: 0 for none, 1 to match its outputs"
        " in the unrounded model as closely as the calibration text allows. Values in the middle were best.",
    )
    refit_groups: bool = Field(
        default=False,
        description="Fit a group's scales when it is reached, to weights that already compensate for the groups before it."
        " Columns are rounded group by group: activation_order then orders groups, and columns within each.",
    )
    sweeps: int = Field(
        default=2,
        ge=0,
        description="Sweeps of coordinate descent over all codes and scales after GPTQ; 0 for none.",
    )
    block: int = Field(
        default=256, ge=1, description="Columns between two updates of the whole weight; affects speed only."
    )
    sparsity: float | str | None = Field(
        default=None,
        description="Also prune, as in SparseGPT: a fraction of all weights, or a pattern such as `2:4`; the remaining"
        " weights compensate for both. Columns are then rounded in the stored order.",
    )

    @field_validator("sparsity", mode="before")
    @classmethod
    def _sparsity(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 60:
            value = f"{value // 60}:{value % 60}"  # YAML reads 2:4 without quotes as minutes and seconds
        if isinstance(value, str):
            pattern = Pattern.named(value)
            if AT_A_TIME % pattern.of:
                raise ValueError(
                    f"gptq prunes {AT_A_TIME} columns at a time, which groups of {pattern.of} do not divide"
                )
        elif isinstance(value, (int, float)) and not 0 < value < 1:
            raise ValueError(f"sparsity {value} is neither a fraction between 0 and 1 nor a pattern such as 2:4")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> GptqOptions:
        if self.sparsity is not None and self.refit_groups:
            raise ValueError("refit_groups and sparsity cannot be combined; keep one")
        return self

    @property
    def columns_together(self) -> int:
        return self.removes.of if isinstance(self.removes, Pattern) else 1

    @property
    def removes(self) -> Pattern | float | None:
        """The pattern or fraction of weights to prune."""
        return Pattern.named(self.sparsity) if isinstance(self.sparsity, str) else self.sparsity

    @property
    def groups_wanted(self) -> bool:
        return self.refit_groups

    @property
    def reads_inputs(self) -> bool:
        return True

    @property
    def reads_unrounded(self) -> bool:
        return self.error_aware > 0
