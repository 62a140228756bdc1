"""What the options of all losses have in common; those of a loss with nothing to choose."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LossOptions(BaseModel):
    """Base of all losses' options: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
