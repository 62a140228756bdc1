"""The settings of each structure: what they take, what they say of what belongs to another, and what the schema says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from smelt.compress import Recipe, SmeltError
from smelt.compress.commands.schema import recipe_schema
from smelt.prune.steps.table import PATTERN, STRUCTURES

from ...tiny import REPOSITORY

LEAST: dict[str, dict[str, Any]] = {
    "blocks": {"count": 1},
    "attention": {"count": 1},
    "mlp": {"ratio": 0.5},
    "ffn": {"ratio": 0.5},
    "heads": {"size": 4},
    "hidden": {"ratio": 0.5},
    "experts": {"count": 1},
    "vocabulary": {"corpus": "builtin"},
    "auto": {"target": {"params": 0.5}},
    "weights": {"sparsity": 0.5},
    PATTERN: {},
}
# A field that each structure does not have, and one whose value it does not know.
WRONG: dict[str, list[dict[str, Any]]] = {
    "blocks": [{"corpus": "builtin"}, {"score": "wanda"}],
    "attention": [{"keep": [0]}, {"score": "pca"}],
    "mlp": [{"update": "merge"}, {"score": "taylor"}],
    "ffn": [{"keep": [0]}, {"allocation": "owl"}],
    "heads": [{"multiple": 8}, {"update": "merge"}],
    "hidden": [{"guard": {"max_layer_error": 0.1}}, {"score": "wanda"}],
    "experts": [{"targets": ["q_proj"]}, {"score": "pca"}],
    "vocabulary": [{"score": "taylor"}, {"ratio": 0.5}],
    "auto": [{"count": 1}, {"update": "sparsegpt"}],
    "weights": [{"target": {"params": 0.5}}, {"update": "merge"}],
    PATTERN: [{"sparsity": 0.5}, {"score": "influence"}],
}


def _section(structure: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"structure": "2:4" if structure == PATTERN else structure, **LEAST[structure], **more}


def _recipe(section: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "output": "out", "steps": [{"prune": section}]}


def _loaded(section: dict[str, Any], tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.dump(_recipe(section), sort_keys=False))
    return Recipe.load(path)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_structure_has_settings_of_its_own(structure: str, tmp_path: Path) -> None:
    section = _section(structure, {})
    recipe = _loaded(section, tmp_path)
    assert type(recipe.steps[0].prune) is STRUCTURES[structure].settings
    stored = recipe.content()["steps"][0]["prune"]
    assert stored.keys() == STRUCTURES[structure].settings.model_fields.keys()
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    jsonschema.Draft202012Validator(recipe_schema()).validate(_recipe(section))


@pytest.mark.parametrize(("structure", "more"), [(name, more) for name, each in WRONG.items() for more in each])
def test_what_belongs_to_another_structure_is_refused_by_file_and_schema(
    structure: str, more: dict[str, Any], tmp_path: Path
) -> None:
    section, (field,) = _section(structure, more), more
    assert not jsonschema.Draft202012Validator(recipe_schema()).is_valid(_recipe(section))
    with pytest.raises(SmeltError) as caught:
        _loaded(section, tmp_path)
    (sentence,) = str(caught.value).split("\n")
    line = next(
        i for i, each in enumerate((tmp_path / "recipe.yaml").read_text().split("\n"), 1) if f" {field}:" in each
    )
    assert sentence.startswith(f"{tmp_path / 'recipe.yaml'}:{line}: steps.0.prune.{field}: ")
    assert "unknown key" not in sentence
    assert any(each in sentence for each in ("expected", "remove"))


def test_all_mistakes_of_a_section_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(SmeltError) as caught:
        _loaded({"structure": "auto", "corpus": "builtin", "count": 3, "multipel": 8, "update": "merge"}, tmp_path)
    said = str(caught.value).split("\n")
    assert len(said) == 5
    for sentence in (
        "steps.0.prune.corpus: corpus is not for auto; remove it",
        "steps.0.prune.count: structure auto chooses the amounts itself; remove count",
        "unknown key steps.0.prune.multipel; expected one of structure, target, multiple; did you mean multiple?",
        "steps.0.prune.update: update merge is not for auto; remove it",
        "steps.0.prune: structure auto needs a target",
    ):
        assert any(sentence in each for each in said), sentence


def test_a_structure_that_is_missing_or_misspelled(tmp_path: Path) -> None:
    for structure, expected in (({}, "lacks the required key structure"), ({"structure": "weigths"}, "mean weights?")):
        with pytest.raises(SmeltError) as caught:
            _loaded({**structure, "sparsity": 2.0}, tmp_path)
        said = str(caught.value)
        assert expected in said
        assert "steps.0.prune.sparsity is 2.0; input should be less than 1" in said
        assert len(said.split("\n")) == 2


@pytest.mark.parametrize("structure", ["blocks", "weights", "2:4"])
def test_what_says_no_more_than_its_absence_is_passed_over(structure: str, tmp_path: Path) -> None:
    """Recipes that runs of earlier versions kept name all fields of all structures."""
    usual = {"corpus": None, "target": None, "size": None, "targets": ["Linear"], "ignore": [], "allocation": "uniform"}
    name = PATTERN if structure == "2:4" else structure
    assert _loaded(_section(name, usual), tmp_path) == _loaded(_section(name, {}), tmp_path)


def test_the_documentation_lists_each_structures_fields() -> None:
    text = (REPOSITORY / "docs" / "pruning.md").read_text().partition("| structure | fields |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in text.strip().split("\n")[1:]]
    said = {
        name: set(re.findall(r"`(\w+)`", fields)) for names, fields in rows for name in re.findall(r"`(.+?)`", names)
    }
    known = {name: set(each.settings.model_fields) - {"structure"} for name, each in STRUCTURES.items()}
    assert said == {'"2:4"' if name == PATTERN else name: fields for name, fields in known.items()}
