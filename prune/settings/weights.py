"""Settings of unstructured and N:M pruning of single weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from ...quant.pattern import Pattern
from ...quant.settings.targets import compiled_patterns
from ...system.settings.variants import Elsewhere, Needed
from .base import GuardedPrune, Share

_LINEARS = Elsewhere("targets and ignore are only for single weights, not for {variant}; remove {name}")


class _Weights(GuardedPrune):
    """Settings common to both."""

    score: Literal["wanda", "magnitude", "obs"] | None = Field(
        default=None,
        description="What to remove first: the lowest magnitude times input norm (`wanda`), the lowest magnitude"
        " (`magnitude`), or what later columns compensate for best (`obs`, SparseGPT's, which needs its update). Default:"
        " `wanda`, and `obs` with `update: sparsegpt`.",
    )
    update: Literal["sparsegpt"] | None = Field(
        default=None,
        description="How to compensate: `sparsegpt` updates the remaining columns. Default: not at all.",
    )
    targets: Annotated[list[str], _LINEARS] = Field(
        min_length=1,
        default=["Linear"],
        description="Linears to prune: `Linear`, module names, or `re:` and a regular expression. The output head is never"
        " pruned.",
    )
    ignore: Annotated[list[str], _LINEARS] = Field(
        default=[], description="Linears to leave unpruned, named like targets."
    )

    @model_validator(mode="after")
    def _made_up_for(self) -> Self:
        if self.score == "obs" and self.update is None:
            raise ValueError("score obs assumes that later columns compensate for the error; add update: sparsegpt")
        return self

    _patterns = field_validator("targets", "ignore")(compiled_patterns)


class PruneWeights(_Weights):
    """Set single weights to zero, without a pattern."""

    amounts: ClassVar = ("sparsity",)

    structure: Literal["weights"] = Field(
        description="What to remove: single weights, without a pattern (unstructured)."
    )
    sparsity: Annotated[Share, Needed("structure weights needs sparsity")] = Field(
        description="Fraction of each linear's weights to set to zero."
    )
    allocation: Annotated[
        Literal["uniform", "owl", "sensitivity"], Elsewhere(value="allocation {value} is for single weights")
    ] = Field(
        default="uniform",
        description="How the sparsity is distributed. `uniform`: the same for every linear; `owl`: less for blocks with more"
        " outliers (OWL); `sensitivity`: per linear, so that the predictions change least, estimated by Fisher information.",
    )


class PrunePattern(_Weights):
    """Set weights to zero in an N:M pattern such as 2:4."""

    decides: ClassVar = "fixes the sparsity"

    structure: str = Field(
        description='What to remove: all but N of every M neighbouring weights of a row, such as "2:4".',
        json_schema_extra={"examples": ["2:4", "4:8"], "pattern": "^[0-9]+:[0-9]+$"},
    )

    @property
    def sparsity(self) -> float | None:
        """The pattern fixes it."""
        return None

    @property
    def allocation(self) -> Literal["uniform"]:
        """Every group has the same number of zeros."""
        return "uniform"

    @field_validator("structure")
    @classmethod
    def _is_a_pattern(cls, name: str) -> str:
        Pattern.named(name)
        return name
