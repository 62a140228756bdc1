"""What keys and values are cached in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from ...system.settings import RecipeModel


class KvCache(RecipeModel):
    """What keys and values are cached in."""

    numbers: Literal["fp8", "int8", "int4"]
    scales: Literal["tensor", "head", "token"] | None = Field(
        default=None,
        description="One scale for a layer or for each head, from the calibration text, or one for each token and head as"
        " it comes. By default `tensor`, which servers read; `token` for int4, which needs it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"numbers": value} if isinstance(value, str) else value


KvCacheField = Annotated[
    KvCache,
    WithJsonSchema({"anyOf": [{"enum": ["fp8", "int8", "int4"]}, KvCache.model_json_schema()]}),
]
