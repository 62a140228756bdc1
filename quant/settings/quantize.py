"""Settings common to all quantization, and those of one scheme for all linears."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ...models.steps.settings import StepSettings
from ...system.settings.variants import Elsewhere, Variant
from .. import scheme_names as schemes
from .guard import Guard
from .kv_cache import KvCacheField
from .methods import Rounding, RoundingField, SchemeField, TransformField
from .targets import Override, compiled_patterns


class QuantizeBase(Variant, StepSettings):
    """Quantize weights, and activations if the scheme does. Each subclass is selected by its ``scheme``."""

    scheme: Any
    group_size: int | None = Field(
        default=None,
        description="Columns per scale; -1 for one scale per output channel; default: the scheme's.",
    )
    kv_cache: KvCacheField | None = Field(
        default=None,
        description="Format of the KV cache: `fp8`, `int8` or `int4`, or {dtype: …, scales: …}; default: not quantized.",
    )
    embeddings: Literal["int8"] | None = Field(
        default=None,
        description="Format of the input embedding: `int8`, with one scale per token; default: not quantized.",
    )
    transforms: list[TransformField] = Field(
        default=[],
        description="Transforms of the weights before rounding, in order; they do not change the model's function.",
    )
    rounding: RoundingField = Field(
        default_factory=lambda: Rounding(method="nearest"),
        description="Rounding method: a name, or {method: …, option: …}.",
    )
    targets: list[str] = Field(
        min_length=1,
        default=["Linear"],
        description="Linears to quantize: `Linear`, module names, or `re:` and a regular expression.",
    )
    ignore: list[str] = Field(
        default=["lm_head"],
        description="Linears to leave unquantized, named like targets; `lm_head` is the output head by any name.",
    )
    guard: Guard | None = Field(default=None, description="Limit on each layer's error; default: none.")
    diagnostics: int | None = Field(
        default=None,
        ge=1,
        description="Calibration windows for measuring errors of layers' outputs if nothing else reads text; by default the"
        " errors of their weights are reported.",
    )
    overrides: list[Override] = Field(
        default=[], description="Linears with another scheme or rounding; the last matching entry applies."
    )

    _patterns = field_validator("targets", "ignore")(compiled_patterns)

    def calibration_problem(self, samples: int) -> str | None:
        if not self.diagnostics or self.diagnostics <= samples:
            return None
        return f"diagnostics asks for {self.diagnostics} windows, but calibrate.samples is {samples}; raise calibrate.samples"


class PostTrainingQuantize(QuantizeBase):
    """Quantize weights, and activations if the scheme does; one scheme for all linears except overrides."""

    scheme: SchemeField = Field(
        description="Number format, by its name in compressed-tensors.",
        json_schema_extra={"enum": list(schemes.SPELLED)},
    )
    inputs: Annotated[
        Literal["dynamic", "static", "static_asymmetric"] | None,
        Elsewhere("inputs is not for scheme: auto; remove it, or name a scheme instead of auto"),
    ] = Field(
        default=None,
        description="Scales of 8-bit inputs: computed per token, or from the calibration text; default: the scheme's.",
    )

    _own_rounding = model_validator(mode="before")(schemes.with_own_rounding)

    @model_validator(mode="after")
    def _fields_fit_scheme(self) -> PostTrainingQuantize:
        schemes.check(self.scheme, self.group_size, self.inputs)
        schemes.check_rounding(self.scheme, self.rounding.method)
        return self
