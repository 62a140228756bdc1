"""Tasks and groups: their values are lm-eval's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from smelt.compress.evaluation.against import is_worse, primary_tasks
from smelt.compress.evaluation.harness_model import SmeltLM
from smelt.compress.evaluation.result import Against, ModelResult, TaskChange
from smelt.compress.evaluation.tasks import Tasks

from ..tiny import SMELT_6M
from . import report_samples


@pytest.fixture(scope="module")
def model() -> SmeltLM:
    return SmeltLM(str(SMELT_6M), disable_tqdm=True, quiet=True)


@pytest.mark.parametrize("by_size", [True, False])
def test_a_group_has_the_value_that_lm_eval_gives_it(by_size: bool, model: SmeltLM, tmp_path: Path) -> None:
    """The tasks differ in size, so that the two kinds of mean do too."""
    for name, right in (("ups", [1, 1, 1]), ("downs", [0, 1, 0, 1, 0, 1, 0])):
        lines = [{"text": "The sky is", "ends": [" blue", " qzx"], "right": 1 - which} for which in right]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/{name}.jsonl}}\n"
            "output_type: multiple_choice\ntest_split: train\ndoc_to_text: text\ndoc_to_target: right\n"
            "doc_to_choice: ends\nmetric_list: [{metric: acc}]\nmetadata: {version: 1.0}\n"
        )
    path = tmp_path / "both.yaml"
    path.write_text(
        "group: both\ntask: [ups, downs]\naggregate_metric_list:\n"
        f"  - {{metric: acc, aggregation: mean, weight_by_size: {str(by_size).lower()}}}\nmetadata: {{version: 3.0}}\n"
    )
    tasks = Tasks.find([str(path)])
    results = [result for name in tasks.loaded for result in tasks.run(name, model, None, None)]
    assert len({result.value for result in results}) == 2
    (group,) = tasks.of_groups(results)
    manager = TaskManager(include_path=tmp_path, include_defaults=False)
    expected = evaluator.evaluate(lm=model, task_dict=manager.load(["both"]), bootstrap_iters=0)
    assert expected is not None
    assert group.value == pytest.approx(expected["groups"]["both"]["acc,none"])
    assert group.version == "3.0"
    assert [tasks.group_of(name) for name in ("ups", "downs")] == ["both", "both"]
    members = [result.model_copy(update={"group": "both"}) for result in results]
    assert [result.task for result, _ in primary_tasks(_with([group, *members]))] == ["both"]
    alone = Tasks.find([str(path), str(tmp_path / "ups.yaml")])
    assert [alone.group_of(name) for name in ("ups", "downs")] == [None, "both"]


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
