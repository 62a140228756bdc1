"""What the options of all rounding methods have in common; those of a method with nothing to choose."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
