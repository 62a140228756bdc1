"""Options common to all rounding methods, which are also those of methods without options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RoundingOptions(BaseModel):
    """Base of every method's options: strict, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def reads_inputs(self) -> bool:
        """Whether the method needs a layer's inputs on the calibration text."""
        return False

    @property
    def reads_unrounded(self) -> bool:
        """Whether the method also needs the layer's inputs in the unrounded model (``stats.shift``)."""
        return False

    @property
    def groups_wanted(self) -> bool:
        """Whether the options apply only to formats with group scales."""
        return False

    @property
    def columns_together(self) -> int:
        """Size of the groups of neighbouring input columns that are rounded together; it must divide their number."""
        return 1
