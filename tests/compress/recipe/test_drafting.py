"""``smelt distill --for-drafting``: the recipe that it runs, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.compress import SmeltError, run
from smelt.compress.cli import app
from smelt.compress.pipeline.plan import Plan
from smelt.compress.recipe.drafting import drafter_recipe
from typer.testing import CliRunner


def test_it_is_a_recipe_of_fewer_blocks_and_total_variation_on_the_models_own_text(tmp_path: Path) -> None:
    recipe = drafter_recipe("builtin:smelt-6m", output=str(tmp_path / "out"), tokens="20k", scheme="W8A16")
    plan = Plan.make(recipe)
    assert plan.problems == []
    pruned, distilled, quantized = (step.model_dump(mode="json", exclude_none=True) for step in plan.recipe.steps)
    assert pruned == {"prune": {"structure": "blocks", "score": "influence", "count": 3}}
    assert distilled["distill"]["loss"]["method"] == "total_variation"
    assert distilled["distill"]["data"]["writer"] == "teacher"
    assert quantized["quantize"]["scheme"] == "W8A16"
    assert plan.recipe.evaluate
    assert plan.recipe.evaluate.drafter == "result"


@pytest.mark.parametrize(
    ("scheme", "blocks", "method", "drafter"), [("W4in8", None, "nested", "nested"), ("W4A16", 6, "gptq", "result")]
)
def test_rounded_weights_learn_where_all_blocks_stay(
    scheme: str, blocks: int | None, method: str, drafter: str, tmp_path: Path
) -> None:
    recipe = drafter_recipe(
        "builtin:smelt-6m", output=str(tmp_path / "out"), tokens="20k", scheme=scheme, blocks=blocks
    )
    plan = Plan.make(recipe)
    assert plan.problems == []
    (step,) = (step.model_dump(mode="json")["quantize"] for step in plan.recipe.steps)
    assert step["scheme"] == scheme.upper()
    assert step["rounding"]["method"] == method
    assert step["ignore"] == []
    assert step["train"]["loss"]["method"] == "forward_kl"
    assert step["train"]["data"]["writer"] == "teacher"
    assert plan.recipe.evaluate
    assert plan.recipe.evaluate.drafter == drafter


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give --for-drafting"),
        (["--for-drafting", "--blocks", "6"], "that is all of builtin:smelt-6m; keep fewer, or give a --scheme"),
        (["--for-drafting", "--blocks", "7", "--scheme", "W4A16"], "has 6 blocks; keep at least 1 of them"),
        (["--for-drafting", "--blocks", "3", "--scheme", "W4in8"], "with W4in8 the model drafts for itself"),
        (["--for-drafting", "--scheme", "W4in8", "--learning-rate", "0"], "greater than 0"),
        (["--for-drafting", "--tokens", "many"], "'many' is not a number of tokens"),
        (["--for-drafting", "--scheme", "W9"], "unknown scheme 'W9'"),
        (["--for-drafting", "--learning-rate", "-1"], "greater than 0"),
        (["--for-drafting", "--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes_get_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    command = ["distill", "builtin:smelt-6m", "--output", str(tmp_path / "out"), *arguments]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert sentence in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match="directory not found"):
        drafter_recipe("./nowhere", output=str(tmp_path))


@pytest.mark.slow
def test_the_report_says_what_the_drafter_gains(tmp_path: Path) -> None:
    recipe = drafter_recipe("builtin:smelt-6m", output=str(tmp_path / "out"), blocks=4, tokens="20k")
    report = run(recipe, progress=False).report
    assert report.baseline is not None
    drafts = report.baseline.drafts
    assert drafts is not None
    assert [load.concurrency for load in drafts.loads] == [1, 4, 8]
    assert all(load.same_answers == load.requests for load in drafts.loads)
