"""Settings of `scheme: auto`: what it may choose from, and what it must keep to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from ...system.machine import human_bytes
from ...system.settings import RecipeModel
from ...system.variants import Elsewhere, Needed
from .. import scheme_names as schemes
from .methods import AUTO, SchemeField
from .quantize import PostTrainingQuantize, QuantizeBase


class Candidate(RecipeModel):
    """A number format that `scheme: auto` may choose."""

    scheme: SchemeField = Field(
        description="By compressed-tensors' name.", json_schema_extra={"enum": list(schemes.SUPPORTED)}
    )
    group_size: int | None = Field(
        default=None, description="Columns that share a scale; absent for the step's, or the scheme's own."
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
    Candidate, WithJsonSchema({"anyOf": [{"enum": list(schemes.SUPPORTED)}, Candidate.model_json_schema()]})
]


USUAL_CANDIDATES = ("W2A16", "W3A16", "W4A16", "W8A16")


class MixedTarget(RecipeModel):
    """What `scheme: auto` must keep to: one of these."""

    bits: float | None = Field(
        default=None, gt=0, description="Most bits a weight of the linears that are chosen for, scales included."
    )
    bytes: int | None = Field(default=None, gt=0, description="Most bytes of the checkpoint's weights files.")
    speedup: float | None = Field(
        default=None, gt=1, description="Least gain in decoding speed of one request, by the runtime on this machine."
    )

    @model_validator(mode="after")
    def _one(self) -> MixedTarget:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("a target is one of bits, bytes and speedup")
        return self

    @property
    def kind(self) -> str:
        """Which of them."""
        return next(iter(self.model_dump(exclude_none=True)))

    @property
    def label(self) -> str:
        """For people: ``4.25 bits``, ``3.5 MB``, ``2x faster``."""
        if self.bits is not None:
            return f"{self.bits:g} bits"
        return human_bytes(self.bytes) if self.bytes is not None else f"{self.speedup:g}x faster"


_ONLY_AUTO = Elsewhere("{name} belongs to scheme: auto; remove it or set scheme: auto")


class PostTrainingQuantizeAuto(QuantizeBase):
    """Store weights in fewer bits, each part of the model in the scheme that loses least within a target."""

    scheme: Literal["auto"] = Field(
        description="The number format: one of `candidates` for every part of the model, so that it loses least within"
        " `target`."
    )
    candidates: Annotated[list[CandidateField] | None, _ONLY_AUTO] = Field(
        default=None,
        min_length=1,
        description=f"What is chosen from, besides leaving a part as it is; absent for {', '.join(USUAL_CANDIDATES)}.",
    )
    target: Annotated[MixedTarget, _ONLY_AUTO, Needed("scheme: auto needs a target, such as target: {bits: 4.25}")] = (
        Field(description="What must be kept to.")
    )
    loss: Annotated[Literal["fisher", "kl"] | None, _ONLY_AUTO] = Field(
        default=None,
        description="How it is judged what rounding a part costs: by gradients, or by measuring it (exact, and slow);"
        " absent for `fisher`.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> PostTrainingQuantizeAuto:
        if self.guard is not None and self.guard.otherwise == "fallback":
            raise ValueError("guard.otherwise: fallback would break auto's target; use warn or fail")
        for candidate in self.auto_candidates():
            schemes.check(candidate.scheme, candidate.group_size)
        return self

    def auto_candidates(self) -> list[Candidate]:
        """What `auto` chooses from, each with its group size settled; none twice."""
        found: dict[object, Candidate] = {}
        for candidate in self.candidates or [Candidate(scheme=name) for name in USUAL_CANDIDATES]:
            if candidate.group_size is None and schemes.SCHEMES[candidate.scheme].group is not None:
                candidate = Candidate(scheme=candidate.scheme, group_size=self.group_size)
            found.setdefault(schemes.settled(candidate.scheme, candidate.group_size), candidate)
        return list(found.values())

    def with_only(self, candidate: Candidate) -> PostTrainingQuantize:
        """The same with one of the candidates for all linears."""
        shared = {name: getattr(self, name) for name in QuantizeBase.model_fields}
        return PostTrainingQuantize.model_construct(**{**shared, **dict(candidate)})


def scheme_or_auto(name: Any) -> Any:
    """A scheme's name in a recipe as this model has it: `auto` in any case."""
    return AUTO if isinstance(name, str) and name.lower() == AUTO else name
