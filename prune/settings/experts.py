"""Settings of removing experts of mixtures."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .base import Count, PruneBase, Share


class PruneExperts(PruneBase):
    """Take experts of mixtures away, the same number from each layer."""

    amounts: ClassVar = ("count", "ratio")

    structure: Literal["experts"] = Field(description="What is taken away: experts of mixtures.")
    score: Literal["activation", "frequency", "taylor", "path"] | None = Field(
        default=None,
        description="What goes first: the least by the norms of what they add on the calibration text (`activation`), by how"
        " many tokens reach them (`frequency`), by what the loss would gain or lose without them to first order (`taylor`),"
        " or by the product of the norms of their weights (`path`; reads no text). Absent for `activation`.",
    )
    count: Count | None = Field(default=None, description="How many experts of each layer go; or give ratio.")
    ratio: Share | None = Field(default=None, description="Which share of the experts goes; or give count.")
