"""Settings of removing units of layers: feed-forward channels and attention heads."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ...system.variants import Elsewhere
from .base import Count, GuardedPrune, Multiple, Share


class _Units(GuardedPrune):
    """What channels and heads share."""

    score: Literal["activation", "wanda", "taylor", "weight", "path"] | None = Field(
        default=None,
        description="What goes first: the least by their norm on the calibration text (`activation`), by that times the"
        " norm of the columns that read them (`wanda`), by what the loss would gain or lose without them to first order"
        " (`taylor`), and without reading any text by the norm of those columns (`weight`) or by the product of the norms"
        " of all that writes and reads them (`path`). Absent for `activation`.",
    )
    allocation: Annotated[
        Literal["uniform", "sensitivity"],
        Elsewhere(
            "allocation shares weights, channels and heads out over layers; {variant} takes the same from each, so remove it"
        ),
    ] = Field(
        default="uniform",
        description="How they are shared out over layers. `uniform`: the same number for each; `sensitivity`: to each block"
        " what costs the predictions least, by their Fisher information. Blocks of different sizes are no plain Hugging"
        " Face model: Smelt loads it, and transformers with smelt.compress.config_for.",
    )
    update: Literal["least_squares"] | None = Field(
        default=None,
        description="How what is left makes up for it: `least_squares` fits the columns that read the rest. Absent for not"
        " at all.",
    )


class PruneChannels(_Units):
    """Take channels of feed-forward layers away, the same number from each unless they are shared out."""

    amounts: ClassVar = ("ratio", "size")

    structure: Literal["ffn"] = Field(description="What is taken away: channels of feed-forward layers.")
    ratio: Share | None = Field(default=None, description="Which share of the channels goes; or give size.")
    size: Count | None = Field(default=None, description="How many channels are left; or give ratio.")
    multiple: Multiple = Field(
        default=None,
        description="What is left is a multiple of it; absent for what kernels and groups of scales like.",
    )

    @property
    def count(self) -> int | None:
        """Channels are not counted: there are too many."""
        return None

    @model_validator(mode="after")
    def _exact_size(self) -> PruneChannels:
        if self.multiple is not None and self.size is not None:
            raise ValueError("size says exactly what is left; remove multiple")
        return self


class PruneHeads(_Units):
    """Take attention heads away, in whole groups that read the same keys and values."""

    amounts: ClassVar = ("count", "ratio", "size")

    structure: Literal["heads"] = Field(description="What is taken away: attention heads.")
    count: Count | None = Field(default=None, description="How many query heads go; or give ratio or size.")
    ratio: Share | None = Field(default=None, description="Which share of the heads goes; or give count or size.")
    size: Count | None = Field(default=None, description="How many query heads are left; or give ratio or count.")

    @property
    def multiple(self) -> int | None:
        """Heads go group by group."""
        return None
