"""Settings of the quantized KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from ...system.settings.recipe_model import RecipeModel
from ..cache_types import BY_NAME, CHOICES

if TYPE_CHECKING:
    CacheDtype = str
else:
    CacheDtype = Literal[CHOICES]
_NEED_TOKEN = " or ".join(name for name in CHOICES if BY_NAME[name].scales == "token")


class KvCache(RecipeModel):
    """Format of the KV cache."""

    dtype: CacheDtype
    scales: Literal["tensor", "head", "token"] | None = Field(
        default=None,
        description="One scale per layer (`tensor`) or per head, from the calibration text, or one per token and head,"
        " computed at run time (`token`). Default: `tensor`, which servers read; `token` for "
        f"{_NEED_TOKEN}, which requires it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, value: Any) -> Any:
        return {"dtype": value} if isinstance(value, str) else value


KvCacheField = Annotated[
    KvCache,
    WithJsonSchema({"anyOf": [{"enum": list(CHOICES)}, KvCache.model_json_schema()]}),
]
