"""A limit on what a layer may lose."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...system.settings import RecipeModel
from .. import scheme_names as schemes
from .methods import SchemeField


class Guard(RecipeModel):
    """What happens to a layer whose outputs change too much."""

    max_layer_error: float = Field(
        gt=0, description="The largest relative error of a layer's outputs on calibration inputs that passes."
    )
    otherwise: Literal["warn", "fail", "fallback"] = Field(
        default="warn", description="Tell it in the report, end the run, or store the layer with `fallback`'s scheme."
    )
    fallback: SchemeField = Field(
        default="W8A16",
        description="The scheme of layers that fail, with all that read the same input.",
        json_schema_extra={"enum": list(schemes.SUPPORTED)},
    )
