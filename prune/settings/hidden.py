"""Settings of narrowing the residual stream."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from .base import Count, Multiple, PruneBase, Share


class PruneHidden(PruneBase):
    """Remove channels of the residual stream."""

    amounts: ClassVar = ("ratio", "size")

    structure: Literal["hidden"] = Field(description="What to remove: channels of the residual stream.")
    score: Literal["pca", "activation", "taylor", "weight"] | None = Field(
        default=None,
        description="What to remove first: the directions of least variance, after hidden states are rotated to their"
        " principal directions (`pca`, as in SliceGPT), or, without rotation, the channels with the lowest norm on the"
        " calibration text (`activation`), the least first-order change of the loss (`taylor`), or the lowest norm of the"
        " weights that read and write them (`weight`). Default: `pca`.",
    )
    ratio: Share | None = Field(default=None, description="Fraction of the channels to remove; or give size.")
    size: Count | None = Field(default=None, description="Number of channels to keep; or give ratio.")
    multiple: Multiple = Field(
        default=None,
        description="The remaining width is a multiple of this; default: what suits kernels and quantization groups.",
    )

    @model_validator(mode="after")
    def _exact_size(self) -> PruneHidden:
        if self.multiple is not None and self.size is not None:
            raise ValueError("size already gives the exact width; remove multiple")
        return self
