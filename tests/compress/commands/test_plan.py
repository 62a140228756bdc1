"""``smelt plan``: what it prints and writes, recipes that validate, and the sentences for what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from smelt.compress import Recipe
from smelt.compress.cli import app
from smelt.compress.recipe.planned import planned_recipe
from smelt.models.directory.directory import ModelDirectory
from smelt.runtime.costs.model_size import model_size
from smelt.runtime.plan.candidates import find_candidates
from typer.testing import CliRunner, Result


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    path = tiny(dtype=torch.bfloat16)
    for weights in path.glob("*.safetensors"):
        weights.unlink()  # config.json is enough
    return path


def _plan(*options: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, options)])


def test_a_table_says_what_is_predicted(model: Path) -> None:
    found = _plan(model, "--device", "h100-sxm")
    assert found.exit_code == 0, found.output
    assert "PREDICTED from constants" in found.stdout
    assert "recommended: bfloat16, the least compressed that fits" in found.stdout
    assert "needs no recipe" in found.stdout
    shown = len([line for line in found.stdout.splitlines() if " ms" in line and "recommended" not in line])
    everything = len(
        [line for line in _plan(model, "--device", "h100-sxm", "--all").stdout.splitlines() if " ms" in line]
    )
    assert shown == 12 < everything
    assert f"and {everything - 12} more" in found.stdout


def test_a_target_gets_a_recipe_that_is_written(model: Path, tmp_path: Path) -> None:
    plain = model_size(ModelDirectory("tiny", model)).weight_bytes
    out = tmp_path / "planned.yaml"
    found = _plan(
        model, "--device", "h100-sxm", "--context", "16", "--target", f"memory={plain}", "--recipe", out, "--json"
    )
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["device"]["times"] == "predicted"
    assert out.read_text() == data["recipe"]
    assert Recipe.load(out).model == str(model)
    assert data["recommended"]["memory_bytes"] <= plain
    assert [path.name for path in tmp_path.iterdir()] == ["planned.yaml"]


def test_recipes_of_all_candidates_validate_and_say_what_they_are(model: Path) -> None:
    for each in find_candidates(ModelDirectory("tiny", model), on_cpu=False, constants=()):
        text = planned_recipe(each, str(model))
        if text is None:
            assert each.label == "bfloat16"
            continue
        made = Recipe.model_validate(yaml.safe_load(text))
        steps = {name: settings for step in made.model_dump()["steps"] for name, settings in step.items()}
        assert steps.get("prune", {}).get("count", 0) == each.dropped
        if each.scheme is not None:
            assert steps["quantize"]["scheme"] == each.scheme.name
            assert (steps["quantize"]["ignore"] == []) == (each.head is not None)
        cache = (steps.get("quantize") or {}).get("kv_cache")
        assert (cache["dtype"] if cache else "auto") == each.kv_cache_dtype


def test_what_no_candidate_meets_exits_with_the_closest(model: Path) -> None:
    found = _plan(model, "--device", "h100-sxm", "--target", "tokens_per_second=1e7")
    assert found.exit_code == 1
    assert "comes closest: tokens_per_second is" in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert "W4A16" in found.stdout


WRONG: dict[str, tuple[list[str], str]] = {
    "a device": (["--device", "h100"], "unknown device 'h100'"),
    "a target": (["--target", "speed=3"], "--target: 'speed=3' is none; known: tokens_per_second=50"),
    "a target without its unit": (
        ["--target", "memory=24"],
        "--target: memory is '24', which is 24 bytes; give a unit",
    ),
    "a target's value": (["--target", "ttft=fast"], "--target: ttft is 'fast'; it must be a number above 0"),
    "a target's unit": (["--target", "batch=3GB"], "--target: batch is '3GB'"),
    "a target of nothing": (["--target", "batch=0"], "--target: batch is '0'"),
    "a target twice": (["--target", "batch=1", "--target", "batch=2"], "batch is given twice"),
    "a scheme": (["--scheme", "W5A16"], "--scheme: 'W5A16' is not planned; known: unquantized, W8A16"),
    "a long context": (["--context", "9999999"], "--context is 9,999,999, but"),
    "devices": (["--devices", "12"], "key-value heads cannot be divided between 12 devices"),
    "measuring elsewhere": (["--measure"], "--measure times this machine; leave --device out"),
    "a recipe's folder": (["--recipe", "no/such/recipe.yaml"], "--recipe: no/such is not a directory"),
}


def test_a_model_that_needs_nothing_gets_no_recipe(model: Path, tmp_path: Path) -> None:
    found = _plan(model, "--device", "h100-sxm", "--recipe", str(tmp_path / "planned.yaml"))
    assert found.exit_code == 0
    assert "no recipe is written: the model as it is meets what was asked for" in found.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_in_a_sentence(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options, sentence = WRONG[what]
    found = _plan(model, *([] if "--device" in options else ["--device", "h100-sxm"]), *options)
    assert found.exit_code == 1
    assert sentence in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert "Traceback" not in found.output
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_is_there_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("x")
    found = _plan(model, "--device", "h100-sxm", "--scheme", "W4A16", "--recipe", str(tmp_path / "mine.yaml"))
    assert found.exit_code == 1
    assert "mine.yaml exists; choose another file" in found.stderr
    assert (tmp_path / "mine.yaml").read_text() == "x"
