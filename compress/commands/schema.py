"""``smelt schema``: the JSON schemas of recipes and of reports."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .common.outcome import reporting_errors


@reporting_errors
def schema(
    report: Annotated[bool, typer.Option("--report", help="The schema of report.json instead.")] = False,
) -> int:
    """Print the JSON schema of recipes, for editors that complete and check YAML; or that of reports.

    Examples:

        smelt schema > recipes/recipe.schema.json

        smelt schema --report > docs/report.schema.json
    """
    from ..results.report import report_schema

    print(json.dumps(report_schema() if report else recipe_schema(), indent=2))
    return 0


def recipe_schema() -> dict[str, Any]:
    """The schema that editors use to complete and check a recipe file.

    It differs from the Python model where a file has other ways to say the same: ``extends`` stands in
    for required fields, and a rounding method may be a bare name.
    """
    from ..recipe.recipe import Recipe
    from ..sweep.trials import SweepSettings

    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Smelt recipe"
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Path of a base recipe, relative to this file, whose fields this one overrides.",
    }
    sweep = SweepSettings.model_json_schema()
    schema["$defs"] |= sweep.pop("$defs", {})
    schema["properties"]["sweep"] = sweep | {"description": "The fields to vary, in a file for `smelt sweep`."}
    required = schema.pop("required")
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    return schema
