"""The recipe's section about quantization."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from ...system.settings import RecipeModel
from .. import scheme_names as schemes
from .auto import USUAL_CANDIDATES, Candidate, CandidateField, Target
from .guard import Guard
from .kv_cache import KvCacheField
from .methods import AUTO, Rounding, RoundingField, SchemeOrAutoField, TransformField
from .targets import Override, compiled_patterns


class Quantize(RecipeModel):
    """Store weights (and compute with activations) in fewer bits."""

    scheme: SchemeOrAutoField = Field(
        description="The number format, by compressed-tensors' name; `auto` chooses one of `candidates` for every part"
        " of the model, so that it loses least within `target`.",
        json_schema_extra={"enum": [AUTO, *schemes.SUPPORTED]},
    )
    group_size: int | None = Field(
        default=None,
        description="Columns that share a scale; -1 for one scale per output channel; absent for the scheme's own.",
    )
    candidates: list[CandidateField] | None = Field(
        default=None,
        min_length=1,
        description=f"What `auto` chooses from, besides leaving a part as it is; absent for {', '.join(USUAL_CANDIDATES)}.",
    )
    target: Target | None = Field(default=None, description="What `auto` must keep to.")
    loss: Literal["fisher", "kl"] | None = Field(
        default=None,
        description="How `auto` judges what rounding a part costs: by gradients, or by measuring it (exact, and slow);"
        " absent for `fisher`.",
    )
    inputs: Literal["dynamic", "static", "static_asymmetric"] | None = Field(
        default=None,
        description="Where 8-bit inputs get their scales from: each token, or the calibration text; absent for the scheme's own.",
    )
    kv_cache: KvCacheField | None = Field(
        default=None,
        description="What keys and values are cached in: `fp8`, `int8` or `int4`, or {numbers: …, scales: …}; absent for"
        " as they are computed.",
    )
    embeddings: Literal["int8"] | None = Field(
        default=None,
        description="What the input embedding is stored in: `int8`, with a scale for each token; absent for as it is.",
    )
    transforms: list[TransformField] = Field(
        default=[],
        description="What is done to the weights before they are rounded, in order, without changing the function.",
    )
    rounding: RoundingField = Field(
        default_factory=lambda: Rounding(method="nearest"),
        description="How codes are picked: a name, or {method: …, option: …}.",
    )
    targets: list[str] = Field(
        min_length=1,
        default=["Linear"],
        description="What to quantize: `Linear`, module names, or `re:` and a regular expression.",
    )
    ignore: list[str] = Field(
        default=["lm_head"],
        description="What to leave as it is, named like targets; `lm_head` is the output head by any name.",
    )
    guard: Guard | None = Field(default=None, description="A limit on what a layer may lose; absent for none.")
    diagnostics: int | None = Field(
        default=None,
        ge=1,
        description="Calibration windows on which the errors of layers' outputs are measured where nothing else reads text;"
        " absent for the errors of their weights.",
    )
    overrides: list[Override] = Field(
        default=[], description="Linears with another scheme or rounding; where several name one, the last decides."
    )

    @model_validator(mode="after")
    def _fields_fit_scheme(self) -> Quantize:
        if self.scheme != AUTO:
            schemes.check(self.scheme, self.group_size, self.inputs)
            given = [name for name in ("candidates", "target", "loss") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} belongs to scheme: auto; remove it or set scheme: auto")
            return self
        if self.target is None:
            raise ValueError("scheme: auto needs a target, such as target: {bits: 4.25}")
        if self.inputs is not None:
            raise ValueError("inputs belongs to one scheme; remove it, or name a scheme instead of auto")
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

    _patterns = field_validator("targets", "ignore")(compiled_patterns)
