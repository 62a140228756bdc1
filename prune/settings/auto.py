"""Settings of `structure: auto`, the search for a shape within a target."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ...system.settings.recipe_model import RecipeModel
from ...system.settings.variants import Elsewhere, Needed
from .base import Multiple, PruneBase, Share


class LatencyPlace(RecipeModel):
    """The batch size and context length at which latency is measured."""

    batch: int = Field(default=1, ge=1, le=64, description="Batch size: sequences decoded together.")
    context: int = Field(default=256, ge=2, description="Context length in tokens, including the new one.")


class PruneTarget(RecipeModel):
    """The limit that `structure: auto` must meet: either params or latency."""

    params: Share | None = Field(default=None, description="Most parameters to keep, as a fraction of the original's.")
    latency: Share | None = Field(
        default=None,
        description="Highest decode latency, as a fraction of the original's, measured on this machine with the runtime.",
    )
    at: LatencyPlace | None = Field(
        default=None, description="Batch size and context of the latency; default: one sequence of 256 tokens."
    )

    @model_validator(mode="after")
    def _one(self) -> PruneTarget:
        if (self.params is None) == (self.latency is None):
            raise ValueError("a target has exactly one of params and latency")
        return self

    @property
    def place(self) -> LatencyPlace:
        """The batch size and context at which latency is measured."""
        return self.at or LatencyPlace()

    @property
    def label(self) -> str:
        """For messages and reports: ``0.7 of the parameters``."""
        if self.params is not None:
            return f"{self.params:g} of the parameters"
        return f"{self.latency:g} of the latency"


class PruneAuto(PruneBase):
    """Remove blocks, heads, feed-forward channels and channels of the residual stream, as a search finds best."""

    decides: ClassVar = "chooses the amounts itself"

    structure: Literal["auto"] = Field(
        description="What to remove: the combination that a search within `target` finds best."
    )
    target: Annotated[
        PruneTarget,
        Needed("structure auto needs a target, such as target: {params: 0.7}"),
        Elsewhere("target is only for structure auto, not for {variant}; remove it"),
    ] = Field(description="Limit that the shape must meet; the shape with the least loss within it is chosen.")
    multiple: Multiple = Field(
        default=None,
        description="Remaining widths are multiples of this; default: what suits kernels and quantization groups.",
    )
