"""Settings of `scheme: auto`: its candidates and its target."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from ...system.hardware.machine import human_bytes
from ...system.settings.recipe_model import RecipeModel
from ...system.settings.variants import Elsewhere, Needed
from .. import scheme_names as schemes
from .methods import AUTO, SchemeField
from .quantize import PostTrainingQuantize, QuantizeBase


class Candidate(RecipeModel):
    """A number format that `scheme: auto` may choose."""

    scheme: SchemeField = Field(
        description="Name of the scheme in compressed-tensors.", json_schema_extra={"enum": list(schemes.SPELLED)}
    )
    group_size: int | None = Field(
        default=None, description="Columns per scale; default: the step's, or else the scheme's."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"scheme": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _group_size_fits_scheme(self) -> Candidate:
        schemes.check(self.scheme, self.group_size)
        return self


CandidateField = Annotated[
    Candidate, WithJsonSchema({"anyOf": [{"enum": list(schemes.SPELLED)}, Candidate.model_json_schema()]})
]


USUAL_CANDIDATES = ("W2A16", "W3A16", "W4A16", "W8A16")


class MixedTarget(RecipeModel):
    """The limit that `scheme: auto` must meet: exactly one of these."""

    bits: float | None = Field(
        default=None,
        gt=0,
        description="Most bits per weight, scales included, averaged over the linears that get a scheme.",
    )
    bytes: int | None = Field(default=None, gt=0, description="Most bytes of the checkpoint's weights files in total.")
    speedup: float | None = Field(
        default=None, gt=1, description="Least decode speedup of a single request, with the runtime on this machine."
    )

    @model_validator(mode="after")
    def _one(self) -> MixedTarget:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("a target has exactly one of bits, bytes and speedup")
        return self

    @property
    def kind(self) -> str:
        """Which of them is set."""
        return next(iter(self.model_dump(exclude_none=True)))

    @property
    def label(self) -> str:
        """For messages and reports: ``4.25 bits``, ``3.5 MB``, ``2x faster``."""
        if self.bits is not None:
            return f"{self.bits:g} bits"
        return human_bytes(self.bytes) if self.bytes is not None else f"{self.speedup:g}x faster"


_ONLY_AUTO = Elsewhere("{name} is only for scheme: auto; remove it, or set scheme: auto")


class PostTrainingQuantizeAuto(QuantizeBase):
    """Quantize with a scheme chosen for each part of the model, so that the loss is least within a target."""

    scheme: Literal["auto"] = Field(
        description="The number format: `auto` chooses one of `candidates` for each part of the model, with the least loss"
        " within `target`."
    )
    candidates: Annotated[list[CandidateField] | None, _ONLY_AUTO] = Field(
        default=None,
        min_length=1,
        description=f"Schemes to choose from, besides no quantization; default: {', '.join(USUAL_CANDIDATES)}.",
    )
    target: Annotated[MixedTarget, _ONLY_AUTO, Needed("scheme: auto needs a target, such as target: {bits: 4.25}")] = (
        Field(description="Limit on bits, bytes or speed.")
    )
    loss: Annotated[Literal["fisher", "kl"] | None, _ONLY_AUTO] = Field(
        default=None,
        description="How the loss of rounding a part is estimated: `fisher`, from gradients, or `kl`, measured (exact but"
        " slow); default: `fisher`.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> PostTrainingQuantizeAuto:
        if self.guard is not None and self.guard.otherwise == "fallback":
            raise ValueError("guard.otherwise: fallback could exceed auto's target; use warn or fail")
        for candidate in self.auto_candidates():
            schemes.check(candidate.scheme, candidate.group_size)
        return self

    def auto_candidates(self) -> list[Candidate]:
        """The candidates without duplicates, each with its group size filled in."""
        found: dict[object, Candidate] = {}
        for candidate in self.candidates or [Candidate(scheme=name) for name in USUAL_CANDIDATES]:
            if candidate.group_size is None and schemes.SCHEMES[candidate.scheme].group is not None:
                candidate = Candidate(scheme=candidate.scheme, group_size=self.group_size)
            found.setdefault(schemes.settled(candidate.scheme, candidate.group_size), candidate)
        return list(found.values())

    def with_only(self, candidate: Candidate) -> PostTrainingQuantize:
        """The same settings with one candidate for all linears."""
        shared = {name: getattr(self, name) for name in QuantizeBase.model_fields}
        return PostTrainingQuantize.model_construct(**{**shared, **dict(candidate)})


def scheme_or_auto(name: Any) -> Any:
    """Normalize `auto`, which a recipe may spell in any case; other names are unchanged."""
    return AUTO if isinstance(name, str) and name.lower() == AUTO else name
