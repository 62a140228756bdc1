"""Settings of the search for a shape, depth against widths."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ...system.settings import RecipeModel
from ...system.variants import Elsewhere, Needed
from .base import Multiple, PruneBase, Share


class LatencyPlace(RecipeModel):
    """Where latency is measured."""

    batch: int = Field(default=1, ge=1, le=64, description="Sequences that decode together.")
    context: int = Field(default=256, ge=2, description="Tokens that each of them has, the new one included.")


class PruneTarget(RecipeModel):
    """What `structure: auto` must keep to: one of params and latency."""

    params: Share | None = Field(default=None, description="The largest share of the parameters that is left.")
    latency: Share | None = Field(
        default=None,
        description="The largest share of the time that a decoding step takes, measured on this machine's runtime.",
    )
    at: LatencyPlace | None = Field(
        default=None, description="For how many sequences, and how long; absent for one sequence of 256 tokens."
    )

    @model_validator(mode="after")
    def _one(self) -> PruneTarget:
        if (self.params is None) == (self.latency is None):
            raise ValueError("a target is one of params and latency")
        return self

    @property
    def place(self) -> LatencyPlace:
        """Where latency is measured."""
        return self.at or LatencyPlace()

    @property
    def label(self) -> str:
        """For people: ``0.7 of the parameters``."""
        if self.params is not None:
            return f"{self.params:g} of the parameters"
        return f"{self.latency:g} of the latency"


class PruneAuto(PruneBase):
    """Take away what a search finds best: blocks, heads, channels of feed-forward layers and of the residual stream."""

    decides: ClassVar = "finds out itself how much goes"

    structure: Literal["auto"] = Field(description="What is taken away: what a search under `target` finds best.")
    target: Annotated[
        PruneTarget,
        Needed("structure auto needs a target, such as target: {params: 0.7}"),
        Elsewhere("target is for structure auto; {variant} needs none, so remove it"),
    ] = Field(description="What the shape must keep to. Among those that do, it loses least.")
    multiple: Multiple = Field(
        default=None,
        description="Widths that are left are multiples of it; absent for what kernels and groups of scales like.",
    )
