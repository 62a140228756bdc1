"""The compressed forms that draft for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run
from smelt.compress.recipe.drafting import drafter_recipe

from ..common import SMELT_6M, WIKITEXT_TRAIN, shared

FORMS: dict[str, dict[str, Any]] = {
    "w4": {"scheme": "W4A16", "rounding": "gptq"},
    "w4in8": {"scheme": "W4in8"},
}
TRAINED_ON = "600k"  # tokens


def forms_of(model: Path, scratch: Path, *, calibrated: bool) -> dict[str, Path]:
    """The model's compressed forms; those that exist are kept."""
    found = {}
    for name, quantize in FORMS.items():
        settings = {**quantize, "ignore": []}
        if not calibrated:  # random weights, whose values nobody reads
            settings |= {"rounding": "nearest"}
        recipe = {
            "model": str(model),
            "output": str(scratch / f"{model.name}-{name}"),
            "evaluate": False,
            "steps": [{"quantize": settings}],
        }
        found[name] = run(Recipe.model_validate(recipe)).checkpoint
    return found


def trained_forms(scratch: Path) -> dict[str, Path]:
    """smelt-6m's forms of the same names, trained as by ``smelt distill --for-drafting``, but on text instead of what the model writes."""
    found = {}
    for name, settings in FORMS.items():
        recipe = drafter_recipe(
            str(SMELT_6M),
            output=str(scratch / f"{SMELT_6M.name}-{name}-trained"),
            blocks=6,
            tokens=TRAINED_ON,
            data=str(shared(WIKITEXT_TRAIN)),
            scheme=settings["scheme"],
        ).model_dump(mode="json")
        recipe["steps"][0]["quantize"]["train"]["data"]["writer"] = "text"
        found[name] = run(Recipe.model_validate({**recipe, "evaluate": False})).checkpoint
    return found
