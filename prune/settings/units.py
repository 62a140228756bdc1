"""Settings of removing units of layers: feed-forward channels and attention heads."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ...system.settings.variants import Elsewhere
from .base import Count, GuardedPrune, Multiple, Share


class _Units(GuardedPrune):
    """Settings common to channels and heads."""

    score: Literal["activation", "wanda", "taylor", "weight", "path"] | None = Field(
        default=None,
        description="What to remove first: the lowest norm on the calibration text (`activation`), that times the norm of"
        " the columns that read the unit (`wanda`), the least first-order change of the loss without it (`taylor`), or,"
        " without reading text, the lowest norm of those columns (`weight`) or product of the norms of all weights that"
        " write and read it (`path`). Default: `activation`.",
    )
    allocation: Annotated[
        Literal["uniform", "sensitivity"],
        Elsewhere(
            "allocation is for weights, channels and heads; {variant} takes the same from each layer, so remove it"
        ),
    ] = Field(
        default="uniform",
        description="How much to remove from each layer. `uniform`: the same number; `sensitivity`: the numbers that change"
        " the predictions least, estimated by Fisher information. A model with blocks of different sizes is not a plain"
        " Hugging Face model: Smelt loads it, and transformers with smelt.compress.config_for.",
    )
    update: Literal["least_squares"] | None = Field(
        default=None,
        description="How to compensate: `least_squares` refits the columns that read the remaining units. Default: not at"
        " all.",
    )


class PruneChannels(_Units):
    """Remove channels of feed-forward layers, the same number from each unless `allocation` says otherwise."""

    amounts: ClassVar = ("ratio", "size")

    structure: Literal["ffn"] = Field(description="What to remove: channels of feed-forward layers.")
    ratio: Share | None = Field(default=None, description="Fraction of the channels to remove; or give size.")
    size: Count | None = Field(default=None, description="Number of channels to keep; or give ratio.")
    multiple: Multiple = Field(
        default=None,
        description="The remaining width is a multiple of this; default: what suits kernels and quantization groups.",
    )

    @property
    def count(self) -> int | None:
        """Channels have ratio and size only."""
        return None

    @model_validator(mode="after")
    def _exact_size(self) -> PruneChannels:
        if self.multiple is not None and self.size is not None:
            raise ValueError("size already gives the exact width; remove multiple")
        return self


class PruneHeads(_Units):
    """Remove attention heads, in whole groups that share keys and values."""

    amounts: ClassVar = ("count", "ratio", "size")

    structure: Literal["heads"] = Field(description="What to remove: attention heads.")
    count: Count | None = Field(default=None, description="Number of query heads to remove; or give ratio or size.")
    ratio: Share | None = Field(default=None, description="Fraction of the heads to remove; or give count or size.")
    size: Count | None = Field(default=None, description="Number of query heads to keep; or give ratio or count.")

    @property
    def multiple(self) -> int | None:
        """Heads are removed by groups instead."""
        return None
