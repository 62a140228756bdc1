"""Recipes: every mistake reported at once, with file, line, value, what was expected and the nearest name."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from smelt.compress import Evaluate, Recipe, SmeltError
from smelt.compress.commands.schema import recipe_schema
from smelt.compress.evaluation.settings import SpeedSettings
from smelt.compress.results.report import report_schema
from smelt.compress.sweep.trials import Sweep

from ...tiny import REPOSITORY
from .. import report_samples

GOOD = """\
model: builtin:smelt-6m
output: out
steps:
  - quantize: {scheme: W4A16, group_size: 64, rounding: gptq}
"""


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(SmeltError) as caught:
        Recipe.load(path, list(overrides))
    return str(caught.value).split("\n")


def test_the_quickstart_recipe_is_what_the_readme_shows() -> None:
    recipe = Recipe.load(REPOSITORY / "recipes" / "quickstart.yaml")
    step = recipe.steps[0].quantize
    assert (recipe.model, recipe.output, recipe.seed) == ("builtin:smelt-6m", "runs/quickstart", 0)
    assert (step.scheme, step.group_size, step.rounding.method, step.ignore) == ("W4A16", 64, "gptq", ["lm_head"])
    assert (recipe.calibrate.samples, recipe.calibrate.length) == (64, 256)


def test_all_mistakes_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "bad.yaml",
        """\
model: builtin:smelt-6m
output: out
sed: 3
calibrate: {source: builtin, samples: many}
steps:
  - quantize:
      scheme: W4A61
      groupsize: 64
      rounding: gtpq
""",
    )
    found = _mistakes(path)
    assert len(found) == 5
    by_line = {int(line.removeprefix(f"{path}:").split(":")[0]): line for line in found}
    assert "unknown key sed" in by_line[3]
    assert "did you mean seed?" in by_line[3]
    assert "'many'" in by_line[4]
    assert "integer" in by_line[4]
    assert "unknown scheme 'W4A61'" in by_line[7]
    assert "did you mean W4A16?" in by_line[7]
    assert "did you mean group_size?" in by_line[8]
    assert "did you mean gptq?" in by_line[9]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the recipe is empty"),
        ("# nothing\n", "the recipe is empty"),
        ("- a\n- b\n", "holds a list"),
        ("model: [unclosed\n", "not valid YAML"),
        ("model: a\n\tb: c\n", "not valid YAML"),
        ("model: a\nmodel: b\n", "bad.yaml:2: model is set twice"),
        ("output: out\nsteps: [{quantize: {scheme: W4A16}}]\n", "the recipe lacks the required key model"),
        (GOOD.replace("[]", ""), None),
        (GOOD.replace("  - quantize: {scheme: W4A16, group_size: 64, rounding: gptq}", "  []"), "steps is []"),
        (GOOD.replace("scheme: W4A16, ", ""), "steps.0.quantize lacks the required key scheme"),
        (GOOD.replace("group_size: 64", "group_size: '64'"), "bad.yaml:4: steps.0.quantize.group_size is '64'"),
        (GOOD.replace("group_size: 64", "group_size: 0"), "group_size must be positive"),
        (GOOD.replace("W4A16", "FP8_DYNAMIC"), "FP8_DYNAMIC has no group_size"),
        (GOOD.replace("W4A16", "MXFP6A16"), "MXFP6A16 cannot be used: Smelt does not write it"),
        (GOOD.replace("rounding: gptq", "rounding: {method: gptq, dampening: 0.1}"), "dampening"),
        (GOOD.replace("rounding: gptq", "rounding: {method: gptq, damping: 7}"), "damping"),
        (GOOD.replace("rounding: gptq", "ignore: ['re:[']"), "not a regular expression"),
        (GOOD.replace("quantize", "quantise"), "did you mean quantize?"),
        (GOOD + "evaluate: true\n", "evaluate"),
    ],
)
def test_each_mistake_has_a_sentence(text: str, expected: str | None, tmp_path: Path) -> None:
    path = _write(tmp_path / "bad.yaml", text)
    if expected is None:
        Recipe.load(path)
    else:
        assert any(expected in line for line in _mistakes(path)), _mistakes(path)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("prune: {structure: weights, sparsity: 0.5, score: wnda}", "wanda"),
        ("prune: {structure: weights, sparsity: 0.5, allocation: owel}", "owl"),
        ("prune: {structure: heads, count: 1, update: least_square}", "least_squares"),
        ("distill: {tokens: 400k, schedule: cosin}", "cosine"),
        ("quantize: {scheme: W4A16, kv_cache: fp9}", "fp8"),
        ("prune: {structure: blocks, count: 1, score: zzz}", None),
        ("prune: {structure: blocks, count: 1, score: 3}", None),
    ],
)
def test_a_misspelt_value_gets_a_suggestion(step: str, expected: str | None, tmp_path: Path) -> None:
    (sentence,) = _mistakes(_write(tmp_path / "bad.yaml", f"model: m\noutput: out\nsteps:\n  - {step}\n"))
    assert "input should be '" in sentence
    assert sentence.endswith(f"'; did you mean {expected}?") if expected else "did you mean" not in sentence


def test_a_missing_or_foreign_file_is_said_to_be_so(tmp_path: Path) -> None:
    assert "recipe file not found" in _mistakes(tmp_path / "none.yaml")[0]
    assert "cannot be read" in _mistakes(tmp_path)[0]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff\xfe\n")
    assert "not UTF-8" in _mistakes(binary)[0]


def test_extends_merges_and_mistakes_point_into_the_right_file(tmp_path: Path) -> None:
    base = _write(tmp_path / "base.yaml", GOOD + "calibrate: {samples: 8, length: 32}\n")
    child = _write(tmp_path / "child.yaml", "extends: base.yaml\nseed: 7\ncalibrate: {samples: 16}\n")
    recipe = Recipe.load(child)
    assert (recipe.seed, recipe.calibrate.samples, recipe.calibrate.length) == (7, 16, 32)
    base.write_text(GOOD.replace("gptq", "gptx"))
    assert f"{base}:4" in _mistakes(child)[0]
    child.write_text("extends: base.yaml\nsteps:\n  - quantize: {scheme: W9}\n")
    assert _mistakes(child)[0].startswith(f"{child}:3")


def test_extends_in_a_circle_is_an_error(tmp_path: Path) -> None:
    _write(tmp_path / "a.yaml", "extends: b.yaml\n")
    _write(tmp_path / "b.yaml", "extends: a.yaml\n")
    (sentence,) = _mistakes(tmp_path / "a.yaml")
    assert "a.yaml -> b.yaml -> a.yaml" in sentence
    _write(tmp_path / "self.yaml", "extends: self.yaml\n")
    assert "circular" in _mistakes(tmp_path / "self.yaml")[0]
    _write(tmp_path / "lost.yaml", "extends: nowhere.yaml\n")
    assert "named by extends in" in _mistakes(tmp_path / "lost.yaml")[0]


def test_set_overrides_any_field(tmp_path: Path) -> None:
    path = _write(tmp_path / "good.yaml", GOOD)
    recipe = Recipe.load(path, ["steps.0.quantize.scheme=W8A16", "calibrate.samples=5", "seed=9", "evaluate=false"])
    assert recipe.steps[0].quantize.scheme == "W8A16"
    assert (recipe.calibrate.samples, recipe.seed, recipe.evaluate) == (5, 9, False)
    assert (
        Recipe.load(path, ["steps.0.quantize.rounding={method: gptq, damping: 0.02}"])
        .steps[0]
        .quantize.rounding.options
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "expected key=value"),
        ("steps.3.quantize.scheme=W8A16", "the recipe has no steps.3"),
        ("calibrate.samples=some", "--set calibrate.samples=some: calibrate.samples is 'some'"),
        ("calibrat.samples=3", "did you mean calibrate?"),
    ],
)
def test_wrong_overrides_are_reported_as_such(override: str, expected: str, tmp_path: Path) -> None:
    assert any(expected in line for line in _mistakes(_write(tmp_path / "good.yaml", GOOD), override))


def test_the_schema_file_is_current() -> None:
    committed = json.loads((REPOSITORY / "recipes" / "recipe.schema.json").read_text())
    assert committed == recipe_schema(), "run `make schema`"


def test_the_schema_of_reports_is_current_and_holds_for_reports() -> None:
    committed = json.loads((REPOSITORY / "docs" / "report.schema.json").read_text())
    assert committed == report_schema(), "run `make schema`"
    validator = jsonschema.Draft202012Validator(committed)
    for build in (report_samples.full, report_samples.minimal, report_samples.partial, report_samples.hostile):
        data = build().as_data()
        validator.validate(data)
        assert None not in data["models"][0].values()
    assert not validator.is_valid({**report_samples.full().as_data(), "verdikt": ""})


def test_the_schema_accepts_every_shipped_recipe_and_refuses_mistakes() -> None:
    validator = jsonschema.Draft202012Validator(recipe_schema())
    shipped = sorted((REPOSITORY / "recipes").glob("*.yaml"))
    assert shipped
    for path in shipped:
        validator.validate(yaml.safe_load(path.read_text()))
        if "sweep" in path.name:
            assert Sweep.load(path).trials
            with pytest.raises(SmeltError, match="run it with `smelt sweep"):
                Recipe.load(path)
        else:
            Recipe.load(path)
    bad = yaml.safe_load(GOOD) | {"sed": 1}
    assert not validator.is_valid(bad)
    assert not validator.is_valid(yaml.safe_load(GOOD.replace("W4A16", "W4A61")))
    assert validator.is_valid({"extends": "quickstart.yaml", "seed": 1})


@pytest.mark.parametrize(
    ("quantize", "holds"),
    [
        ({"scheme": "W4A16", "inputs": "static"}, True),
        ({"scheme": "auto", "target": {"bits": 4}, "candidates": ["W4A16"], "train": {"tokens": "400k"}}, True),
        ({"scheme": "W4A16", "target": {"bits": 4}}, False),
        ({"scheme": "auto", "target": {"bits": 4}, "inputs": "static"}, False),
        ({"scheme": "auto"}, False),
    ],
)
def test_the_schema_knows_what_a_scheme_and_what_auto_takes(quantize: dict[str, object], holds: bool) -> None:
    data = {"model": "m", "output": "out", "steps": [{"quantize": quantize}]}
    assert jsonschema.Draft202012Validator(recipe_schema()).is_valid(data) is holds


def test_speed_is_measured_unless_the_recipe_says_no() -> None:
    data = {"model": "builtin:smelt-6m", "output": "out", "steps": [{"quantize": {"scheme": "W4A16"}}]}
    for evaluate in ({}, {"evaluate": {"text": "builtin"}}):
        asked = Recipe.model_validate({**data, **evaluate}).evaluate
        assert asked
        assert asked.speed == SpeedSettings(prompt=128, generate=64, concurrency=[1, 8], repeats=6)
    quiet = Recipe.model_validate({**data, "evaluate": {"speed": False}}).evaluate
    assert quiet
    assert quiet.speed is False


@pytest.mark.parametrize("positions", [4096, 193, 192, 64, 6])
def test_a_load_that_was_not_chosen_fits_the_model(positions: int) -> None:
    speed = Evaluate().within(positions).speed
    assert speed
    assert 1 <= speed.prompt <= 128
    assert 2 <= speed.generate <= 64
    assert speed.prompt + speed.generate + 1 <= positions
    chosen = Evaluate.model_validate({"speed": {"prompt": 500}}).within(positions).speed
    assert chosen
    assert chosen.prompt == 500  # it is refused where it does not fit


def test_a_model_without_room_for_a_prompt_is_not_timed() -> None:
    assert Evaluate().within(5).speed is False


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_measures_speed(path: Path) -> None:
    asked = (Sweep.load(path).base if "\nsweep:" in path.read_text() else Recipe.load(path)).evaluate
    assert asked
    assert asked.speed
    assert asked.speed.repeats >= 9  # so that one disturbed round does not decide
