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
    ("arguments", "sentence"),
    [
        ([], "give --for-drafting"),
        (["--for-drafting", "--blocks", "6"], "has 6 blocks; keep at least 1 and at most 5"),
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
