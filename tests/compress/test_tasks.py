"""Tasks and groups: their values are lm-eval's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from smelt.compress.evaluation.against import is_worse, primary_tasks
from smelt.compress.evaluation.harness_model import SmeltLM
from smelt.compress.evaluation.result import Against, ModelResult, TaskChange
from smelt.compress.evaluation.tasks import BUILTIN, Tasks

from ..tiny import SMELT_6M
from . import report_samples


@pytest.fixture(scope="module")
def model() -> SmeltLM:
    return SmeltLM(str(SMELT_6M), disable_tqdm=True, quiet=True)


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("limit", [300, 30])
def test_a_group_has_the_value_that_lm_eval_gives_it(by_size: bool, limit: int, model: SmeltLM, tmp_path: Path) -> None:
    """With a limit of 300, which one of them has not, the tasks differ in size, so that the two kinds of mean do too."""
    path = tmp_path / "both.yaml"
    path.write_text(
        "group: both\ntask: [smelt_continuation, smelt_last_word]\naggregate_metric_list:\n"
        f"  - {{metric: acc, aggregation: mean, weight_by_size: {str(by_size).lower()}}}\nmetadata: {{version: 3.0}}\n"
    )
    tasks = Tasks.find([str(path)])
    results = [result for name in tasks.loaded for result in tasks.run(name, model, limit, None)]
    (group,) = tasks.of_groups(results)
    manager = TaskManager(include_path=[BUILTIN, tmp_path], include_defaults=False)
    expected = evaluator.evaluate(lm=model, task_dict=manager.load(["both"]), limit=limit, bootstrap_iters=0)
    assert expected is not None
    assert group.value == pytest.approx(expected["groups"]["both"]["acc,none"])
    assert group.version == "3.0"
    assert {result.group for result in results} == {"both"}
    assert [result.task for result, _ in primary_tasks(_with([group, *results]))] == ["both"]


def test_of_a_task_the_first_metric_of_which_more_is_better_stands_for_it(model: SmeltLM) -> None:
    tasks = Tasks.find(["smelt_last_word"])
    found = tasks.run("smelt_last_word", model, 5, None)
    assert [result.metric for result in found] == ["perplexity", "acc"]
    assert [result.metric for result, _ in primary_tasks(_with(found))] == ["acc"]
    worse = TaskChange(task="t", metric="m", filter="none", difference=1.0, significant=True)
    assert is_worse(found[0], worse)
    assert not is_worse(found[1], worse)
    assert not is_worse(found[0], worse.model_copy(update={"significant": False}))


def test_few_shot_examples_are_counted(model: SmeltLM) -> None:
    (plain, *_), (shot, *_) = (
        Tasks.find(["smelt_continuation"]).run("smelt_continuation", model, 5, count) for count in (None, 2)
    )
    assert (plain.fewshot, shot.fewshot) == (0, 2)


def _with(tasks: list) -> ModelResult:  # type: ignore[type-arg]
    return report_samples.full().candidates[0].model_copy(update={"tasks": tasks, "against": Against()})
