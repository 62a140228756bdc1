"""Options common to all losses, which are also those of losses without options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LossOptions(BaseModel):
    """Base of all losses' options: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
