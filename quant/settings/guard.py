"""Settings of `guard`: a limit on each layer's error."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...system.settings.recipe_model import RecipeModel
from .. import scheme_names as schemes
from .methods import SchemeField


class Guard(RecipeModel):
    """A limit on each layer's error, and what to do with layers that exceed it."""

    max_layer_error: float = Field(
        gt=0, description="Maximum relative error of a layer's outputs on calibration inputs."
    )
    otherwise: Literal["warn", "fail", "fallback"] = Field(
        default="warn", description="Report it, end the run, or store the layer in the scheme of `fallback`."
    )
    fallback: SchemeField = Field(
        default="W8A16",
        description="Scheme of layers that exceed the limit, and of linears that read the same input.",
        json_schema_extra={"enum": list(schemes.SPELLED)},
    )
