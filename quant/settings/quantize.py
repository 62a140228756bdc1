"""What the settings of every quantization have in common, and those of one scheme for all linears."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ...system.variants import Elsewhere, Variant
from .. import scheme_names as schemes
from .guard import Guard
from .kv_cache import KvCacheField
from .methods import Rounding, RoundingField, SchemeField, TransformField
from .targets import Override, compiled_patterns


class QuantizeBase(Variant):
    """Store weights (and compute with activations) in fewer bits. A subclass says by which ``scheme`` it is chosen."""

    scheme: Any
    group_size: int | None = Field(
        default=None,
        description="Columns that share a scale; -1 for one scale per output channel; absent for the scheme's own.",
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

    _patterns = field_validator("targets", "ignore")(compiled_patterns)


class PostTrainingQuantize(QuantizeBase):
    """Store weights (and compute with activations) in fewer bits, all in one scheme but for overrides."""

    scheme: SchemeField = Field(
        description="The number format, by compressed-tensors' name.",
        json_schema_extra={"enum": list(schemes.SUPPORTED)},
    )
    inputs: Annotated[
        Literal["dynamic", "static", "static_asymmetric"] | None,
        Elsewhere("inputs belongs to one scheme; remove it, or name a scheme instead of auto"),
    ] = Field(
        default=None,
        description="Where 8-bit inputs get their scales from: each token, or the calibration text; absent for the scheme's own.",
    )

    @model_validator(mode="after")
    def _fields_fit_scheme(self) -> PostTrainingQuantize:
        schemes.check(self.scheme, self.group_size, self.inputs)
        return self
