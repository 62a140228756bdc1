"""What the options of all transforms have in common; those of a transform with nothing to choose."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TransformOptions(BaseModel):
    """Base of every transform's options: strict, and refusing what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def reads_inputs(self) -> bool:
        """Whether the transform asks what layers read of a calibration text."""
        return False
