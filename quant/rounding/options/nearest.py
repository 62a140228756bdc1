"""Options of rounding to nearest."""

from __future__ import annotations

from pydantic import Field

from .base import RoundingOptions


class NearestOptions(RoundingOptions):
    """Options of rounding to nearest."""

    scale_search: bool = Field(
        default=False,
        description="Search each group's scale where that lowers its error weighted by input energy (symmetric integers).",
    )

    @property
    def reads_inputs(self) -> bool:
        return self.scale_search
