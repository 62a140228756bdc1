"""Options of the generalised Jensen-Shannon divergence."""

from __future__ import annotations

from pydantic import Field

from .base import LossOptions


class JsdOptions(LossOptions):
    """Options of the generalised Jensen-Shannon divergence."""

    beta: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="The teacher's weight in the mixture that both distributions are compared with.",
    )
