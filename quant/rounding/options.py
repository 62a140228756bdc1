"""The options of every rounding method, which recipes check without importing torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..pattern import Pattern

MAX_DAMPING = 1.0
# The paper of SparseGPT decides about this many columns at a time where there is no pattern.
AT_A_TIME = 128


class RoundingOptions(BaseModel):
    """Base of every method's options: strict, and refusing what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def reads_inputs(self) -> bool:
        """Whether the method asks what its layer reads of a calibration text."""
        return False

    @property
    def reads_unrounded(self) -> bool:
        """Whether the method also asks what its layer reads in the unrounded model (``stats.shift``)."""
        return False

    @property
    def groups_wanted(self) -> bool:
        """Whether the options make sense only for formats whose scales are those of groups."""
        return False

    @property
    def columns_together(self) -> int:
        """Input columns are treated in groups of so many neighbours, which must divide their number."""
        return 1


class NearestOptions(RoundingOptions):
    """Options of rounding to nearest."""

    scale_search: bool = Field(
        default=False,
        description="Search each group's scale where that lowers its error weighted by input energy (symmetric integers).",
    )

    @property
    def reads_inputs(self) -> bool:
        return self.scale_search


class GptqOptions(RoundingOptions):
    """Options of GPTQ."""

    damping: float = Field(
        default=0.01, gt=0, le=MAX_DAMPING, description="Share of the Hessian's mean diagonal added to its diagonal."
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
        description="Share of the error in its inputs that a layer makes up for: 0 for none, 1 to match what it gives"
        " in the unrounded model as closely as the calibration text allows. In the middle it gained most.",
    )
    refit_groups: bool = Field(
        default=False,
        description="Fit a group's scales when it is reached, to weights that already make up for the groups before it."
        " Columns keep together by group: with activation_order, groups are ordered, and columns within each.",
    )
    block: int = Field(default=256, ge=1, description="Columns between two updates of the whole weight; speed only.")
    sparsity: float | str | None = Field(
        default=None,
        description="Remove weights on the way, SparseGPT's way: a share of all, or a pattern such as `2:4`; what is left makes"
        " up for both. Columns then go in the stored order.",
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
                    f"gptq chooses {AT_A_TIME} columns at a time, which are not made of groups of {pattern.of}"
                )
        elif isinstance(value, (int, float)) and not 0 < value < 1:
            raise ValueError(f"sparsity {value} is no share between 0 and 1, and no pattern such as 2:4")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> GptqOptions:
        if self.sparsity is not None and self.refit_groups:
            raise ValueError("refit_groups settles a group at a time, and sparsity other numbers of columns; keep one")
        return self

    @property
    def columns_together(self) -> int:
        return self.removes.of if isinstance(self.removes, Pattern) else 1

    @property
    def removes(self) -> Pattern | float | None:
        """What is removed on the way."""
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


class HqqOptions(RoundingOptions):
    """Options of HQQ; the defaults are the authors' own."""

    lp_norm: float = Field(
        default=0.7, gt=0, le=1, description="p of the norm that is minimised; below 1 it favours outliers."
    )
    beta: float = Field(default=10.0, gt=0, description="Weight of the quadratic term at the first iteration.")
    kappa: float = Field(default=1.01, ge=1, description="Growth of beta per iteration.")
    iterations: int = Field(default=20, ge=1, description="Most iterations; a row stops when its error stops falling.")


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
