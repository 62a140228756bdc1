"""The JSON schema of recipe files."""

from __future__ import annotations

from typing import Any

from ..recipe.recipe import Recipe
from ..sweep.trials import SweepSettings


def recipe_schema() -> dict[str, Any]:
    """The schema that editors use to complete and check a recipe file.

    It differs from the Python model where a file may say things in another way: ``extends`` stands in
    for required fields, and a rounding method may be a bare name.
    """
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Smelt recipe"
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Another recipe, relative to this file, whose fields this one changes.",
    }
    sweep = SweepSettings.model_json_schema()
    schema["$defs"] |= sweep.pop("$defs", {})
    schema["properties"]["sweep"] = sweep | {"description": "What varies, in a file for `smelt sweep`."}
    required = schema.pop("required")
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    return schema
