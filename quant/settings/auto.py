"""What `scheme: auto` may choose from, and what it must keep to."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator

from ...system.machine import human_bytes
from ...system.settings import RecipeModel
from .. import scheme_names as schemes
from .methods import SchemeField


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


class Target(RecipeModel):
    """What `scheme: auto` must keep to: one of these."""

    bits: float | None = Field(
        default=None, gt=0, description="Most bits a weight of the linears that are chosen for, scales included."
    )
    bytes: int | None = Field(default=None, gt=0, description="Most bytes of the checkpoint's weights files.")
    speedup: float | None = Field(
        default=None, gt=1, description="Least gain in decoding speed of one request, by the runtime on this machine."
    )

    @model_validator(mode="after")
    def _one(self) -> Target:
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
