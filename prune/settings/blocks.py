"""Settings of removing whole blocks, or the attention or the feed-forward part of some."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from .base import Count, PruneBase, Share

_SCORE = (
    "What goes first: those that change the direction of their inputs least (`influence`, ShortGPT's; one pass), or, one"
    " after another, the one without which the calibration text is predicted best (`loss`). Absent for `influence`."
)
Score = Literal["influence", "loss"]


class PruneBlocks(PruneBase):
    """Take whole blocks away; a smaller model is left."""

    amounts: ClassVar = ("count", "ratio", "keep")

    structure: Literal["blocks"] = Field(description="What is taken away: whole blocks.")
    score: Score | None = Field(default=None, description=_SCORE)
    count: Count | None = Field(default=None, description="How many blocks go; or give ratio or keep.")
    ratio: Share | None = Field(default=None, description="Which share of the blocks goes; or give count or keep.")
    keep: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Which blocks stay, by number, such as [0, 2, 5]; nothing is measured then. Or give count or ratio.",
    )
    update: Literal["merge"] | None = Field(
        default=None,
        description="How what is left makes up for it: `merge` adds to a block what those removed behind it differ from it"
        " by (LaCo). Absent for not at all.",
    )

    @model_validator(mode="after")
    def _keeps_by_number(self) -> PruneBlocks:
        if self.keep is not None and self.score is not None:
            raise ValueError("keep says itself which blocks stay; remove score")
        if self.keep is not None and self.keep != sorted(set(self.keep)):
            raise ValueError(f"keep: {self.keep} must name each block once, in order")
        return self


class PruneParts(PruneBase):
    """Take the attention or the feed-forward part of some blocks away; zeros are left in their place."""

    amounts: ClassVar = ("count", "ratio")

    structure: Literal["attention", "mlp"] = Field(
        description="What is taken away: the attention of some blocks, or their feed-forward part (`mlp`)."
    )
    score: Score | None = Field(default=None, description=_SCORE)
    count: Count | None = Field(default=None, description="Of how many blocks; or give ratio.")
    ratio: Share | None = Field(default=None, description="Of which share of the blocks; or give count.")

    @property
    def keep(self) -> list[int] | None:
        """Parts are never named by number."""
        return None

    @property
    def update(self) -> Literal["merge"] | None:
        """Nothing makes up for a part."""
        return None
