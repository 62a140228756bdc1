"""Settings of removing whole blocks, or only their attention or feed-forward part."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from .base import Count, PruneBase, Share

_SCORE = (
    "What to remove first: the blocks that change the direction of their inputs least (`influence`, ShortGPT's; one pass),"
    " or, one at a time, the block whose removal gives the lowest loss on the calibration text (`loss`). Default:"
    " `influence`."
)
Score = Literal["influence", "loss"]


class PruneBlocks(PruneBase):
    """Remove whole blocks."""

    amounts: ClassVar = ("count", "ratio", "keep")

    structure: Literal["blocks"] = Field(description="What to remove: whole blocks.")
    score: Score | None = Field(default=None, description=_SCORE)
    count: Count | None = Field(default=None, description="Number of blocks to remove; or give ratio or keep.")
    ratio: Share | None = Field(default=None, description="Fraction of the blocks to remove; or give count or keep.")
    keep: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Blocks to keep, by number, such as [0, 2, 5]; nothing is measured then. Or give count or ratio.",
    )
    update: Literal["merge"] | None = Field(
        default=None,
        description="How to compensate: `merge` adds to a block the differences of the weights of removed blocks after it"
        " from its own (LaCo). Default: not at all.",
    )

    @model_validator(mode="after")
    def _keeps_by_number(self) -> PruneBlocks:
        if self.keep is not None and self.score is not None:
            raise ValueError("keep already names the blocks to keep; remove score")
        if self.keep is not None and self.keep != sorted(set(self.keep)):
            raise ValueError(f"keep: {self.keep} must name each block once, in order")
        return self


class PruneParts(PruneBase):
    """Remove the attention or the feed-forward part of some blocks; zeros are stored in their place."""

    amounts: ClassVar = ("count", "ratio")

    structure: Literal["attention", "mlp"] = Field(
        description="What to remove: the attention of some blocks, or their feed-forward part (`mlp`)."
    )
    score: Score | None = Field(default=None, description=_SCORE)
    count: Count | None = Field(default=None, description="Number of blocks that lose it; or give ratio.")
    ratio: Share | None = Field(default=None, description="Fraction of the blocks that lose it; or give count.")

    @property
    def keep(self) -> list[int] | None:
        """Parts are not selected by number."""
        return None

    @property
    def update(self) -> Literal["merge"] | None:
        """Parts have no update."""
        return None
