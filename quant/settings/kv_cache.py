"""Settings of the quantized KV cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from ...system.settings import RecipeModel


class KvCache(RecipeModel):
    """Format of the KV cache."""

    numbers: Literal["fp8", "int8", "int4"]
    scales: Literal["tensor", "head", "token"] | None = Field(
        default=None,
        description="One scale per layer (`tensor`) or per head, from the calibration text, or one per token and head,"
        " computed at run time (`token`). Default: `tensor`, which servers read; `token` for int4, which requires it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"numbers": value} if isinstance(value, str) else value


KvCacheField = Annotated[
    KvCache,
    WithJsonSchema({"anyOf": [{"enum": ["fp8", "int8", "int4"]}, KvCache.model_json_schema()]}),
]
