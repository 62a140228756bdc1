"""Settings of narrowing the residual stream."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from .base import Count, Multiple, PruneBase, Share


class PruneHidden(PruneBase):
    """Take channels of the residual stream away."""

    amounts: ClassVar = ("ratio", "size")

    structure: Literal["hidden"] = Field(description="What is taken away: channels of the residual stream.")
    score: Literal["pca", "activation", "taylor", "weight"] | None = Field(
        default=None,
        description="What goes first: the least by variance, after hidden states are rotated to their principal directions"
        " (`pca`, SliceGPT's way), or of the hidden states' own channels the least by their norm on the calibration text"
        " (`activation`), by what the loss would gain or lose without them to first order (`taylor`), or by the norm of the"
        " weights that read and write them (`weight`). Absent for `pca`.",
    )
    ratio: Share | None = Field(default=None, description="Which share of the channels goes; or give size.")
    size: Count | None = Field(default=None, description="How many channels are left; or give ratio.")
    multiple: Multiple = Field(
        default=None,
        description="What is left is a multiple of it; absent for what kernels and groups of scales like.",
    )

    @model_validator(mode="after")
    def _exact_size(self) -> PruneHidden:
        if self.multiple is not None and self.size is not None:
            raise ValueError("size says exactly what is left; remove multiple")
        return self
