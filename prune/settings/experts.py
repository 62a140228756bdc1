"""Settings of removing experts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .base import Count, PruneBase, Share


class PruneExperts(PruneBase):
    """Remove experts of mixtures, the same number from each layer."""

    amounts: ClassVar = ("count", "ratio")

    structure: Literal["experts"] = Field(description="What to remove: experts of mixtures.")
    score: Literal["activation", "frequency", "taylor", "path"] | None = Field(
        default=None,
        description="What to remove first: the lowest norm of outputs on the calibration text (`activation`), the fewest"
        " tokens routed to it (`frequency`), the least first-order change of the loss without it (`taylor`), or the lowest"
        " product of its weights' norms (`path`; reads no text). Default: `activation`.",
    )
    count: Count | None = Field(default=None, description="Number of experts to remove from each layer; or give ratio.")
    ratio: Share | None = Field(default=None, description="Fraction of the experts to remove; or give count.")
