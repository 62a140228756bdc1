"""Settings of removing single weights, wherever they are or so many of each group of neighbours."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from ...quant.pattern import Pattern
from ...quant.settings.targets import compiled_patterns
from ...system.variants import Elsewhere, Needed
from .base import GuardedPrune, Share

_LINEARS = Elsewhere("targets and ignore choose linears for single weights; {variant} go from all alike")


class _Weights(GuardedPrune):
    """What all of single weights share."""

    score: Literal["wanda", "magnitude", "obs"] | None = Field(
        default=None,
        description="What goes first: the least by size times input (`wanda`), by size (`magnitude`), or those that later"
        " columns make up for best (`obs`, SparseGPT's own, which needs its update). Absent for `wanda`, and for `obs` with"
        " `update: sparsegpt`.",
    )
    update: Literal["sparsegpt"] | None = Field(
        default=None,
        description="How what is left makes up for it: `sparsegpt` lets the columns to come take over. Absent for not at all.",
    )
    targets: Annotated[list[str], _LINEARS] = Field(
        min_length=1,
        default=["Linear"],
        description="Which linears weights are taken from: `Linear`, module names, or `re:` and a regular expression. The"
        " output head is never one of them.",
    )
    ignore: Annotated[list[str], _LINEARS] = Field(
        default=[], description="Which of these are left as they are, named like targets."
    )

    @model_validator(mode="after")
    def _made_up_for(self) -> Self:
        if self.score == "obs" and self.update is None:
            raise ValueError("score obs is what an error costs once others make up for it; add update: sparsegpt")
        return self

    _patterns = field_validator("targets", "ignore")(compiled_patterns)


class PruneWeights(_Weights):
    """Make single weights zero, wherever they are."""

    amounts: ClassVar = ("sparsity",)

    structure: Literal["weights"] = Field(description="What becomes zero: single weights, wherever they are.")
    sparsity: Annotated[Share, Needed("structure weights needs sparsity")] = Field(
        description="Which share of the weights of each linear."
    )
    allocation: Annotated[
        Literal["uniform", "owl", "sensitivity"], Elsewhere(value="allocation {value} is for single weights")
    ] = Field(
        default="uniform",
        description="How the sparsity is shared out. `uniform`: the same for every linear; `owl`: less for blocks with more"
        " outliers (OWL); `sensitivity`: to each linear what costs the predictions least, by their Fisher information.",
    )


class PrunePattern(_Weights):
    """Make so many weights of each group of neighbours zero, as in 2:4."""

    decides: ClassVar = "says itself how many weights go"

    structure: str = Field(
        description='What becomes zero: so many weights of each group of neighbours, such as "2:4".',
        json_schema_extra={"examples": ["2:4", "4:8"], "pattern": "^[0-9]+:[0-9]+$"},
    )

    @property
    def sparsity(self) -> float | None:
        """The pattern says it."""
        return None

    @property
    def allocation(self) -> Literal["uniform"]:
        """Each group gives as many."""
        return "uniform"

    @field_validator("structure")
    @classmethod
    def _is_a_pattern(cls, name: str) -> str:
        Pattern.named(name)
        return name
