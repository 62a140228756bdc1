"""Tasks and groups: their values are lm-eval's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from smelt.compress import SmeltError
from smelt.compress.evaluation.problems import task_problems
from smelt.compress.evaluation.scoring.aggregations import aggregation
from smelt.compress.evaluation.scoring.tasks import Tasks
from smelt.compress.evaluation.settings import Evaluate
from smelt.compress.integrations.lm_eval import SmeltLM
from smelt.compress.results.result import Against, ModelResult, TaskChange
from smelt.compress.results.tasks import is_worse, primary_tasks

from ....tiny import SMELT_6M
from ... import report_samples


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
    results = [result for name in tasks.loaded for result in tasks.run(name, model, None)]
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
    found = tasks.run("smelt_last_word", model, 5)
    assert [result.metric for result in found] == ["perplexity", "acc"]
    assert [result.metric for result, _ in primary_tasks(_with(found))] == ["acc"]
    worse = TaskChange(task="t", metric="m", filter="none", difference=1.0, significant=True)
    assert is_worse(found[0], worse)
    assert not is_worse(found[1], worse)
    assert not is_worse(found[0], worse.model_copy(update={"significant": False}))


def test_few_shot_examples_are_counted(model: SmeltLM) -> None:
    (plain, *_), (shot, *_) = (
        Tasks.find(["smelt_continuation"], fewshot=count).run("smelt_continuation", model, 5) for count in (None, 2)
    )
    assert (plain.fewshot, shot.fewshot) == (0, 2)


def test_items_have_the_same_examples_in_parts(model: SmeltLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is answered in parts, for a guarantee, would be another task."""
    tasks = Tasks.find(["smelt_continuation"], fewshot=2)
    seen: dict[int, set[str]] = {}
    items = list(range(12))  # which lm-eval numbers anew
    asked = model.loglikelihood

    def loglikelihood(requests: list[Any], *others: Any, **more: Any) -> Any:
        for each in requests:
            seen.setdefault(items[each.doc_id], set()).add(each.args[0])
        return asked(requests, *others, **more)

    monkeypatch.setattr(model, "loglikelihood", loglikelihood)
    whole = tasks.run("smelt_continuation", model, 12)
    for part in ([0, 1, 7], [2, 5, 11], [3, 4, 6, 8, 9, 10]):
        items[:] = part
        for all_of_them, some in zip(whole, tasks.run("smelt_continuation", model, None, part), strict=True):
            assert some.by_item == [all_of_them.by_item[item] for item in part]
    assert len(seen) == 12
    assert all(len(prompts) == 1 for prompts in seen.values())
    assert len(set().union(*seen.values())) == 12


def test_what_identifies_a_task_has_its_items_and_examples(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"text": "The sky is", "ends": [" blue", " qzx"], "right": 0}\n')

    def found(example: str, fewshot: int | None) -> tuple[str, str]:
        (tmp_path / "train.jsonl").write_text(json.dumps({"text": example, "ends": [" a", " b"], "right": 0}) + "\n")
        files = f"{{train: {tmp_path}/train.jsonl, test: {tmp_path}/test.jsonl}}"
        (tmp_path / "mine.yaml").write_text(
            f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {files}}}\noutput_type: multiple_choice\n"
            "training_split: train\nfewshot_split: train\ntest_split: test\ndoc_to_text: text\ndoc_to_target: right\n"
            "doc_to_choice: ends\nmetric_list: [{metric: acc}]\nmetadata: {version: 1.0}\n"
        )
        tasks = Tasks.find([str(tmp_path / "mine.yaml")], fewshot=fewshot)
        return tasks.definitions["mine"], tasks.data["mine"]

    (one, items), (other, same) = found("Grass is", 1), found("Snow is", 1)
    assert one != other
    assert items == same
    assert found("Grass is", None)[0] == found("Snow is", None)[0]


def _module(folder: Path, helper: str) -> None:
    (folder / "code.py").write_text(
        f"def prepare(data):\n    return data\n\n\ndef helper(doc):\n    return {helper}\n\n\n"
        "def score(doc, results):\n    found = helper(doc)\n    return {} if found is None else {'acc': found, 'more': 1.0}\n"
    )


SOME = "float('nan') if doc['right'] else 1.0"


@pytest.mark.slow
def test_what_identifies_a_task_has_its_code_and_what_that_calls(tmp_path: Path) -> None:
    """The same in another process, where functions have other addresses, and another after an edit of a helper."""
    more = "process_docs: !function code.prepare\nprocess_results: !function code.score\n"
    path = _task(tmp_path, more + "doc_to_text: text\n")
    _module(tmp_path, "1.0")
    here = Tasks.find([str(path)], trust_code=True).definitions["mine"]
    script = (
        "from smelt.compress.evaluation.scoring.tasks import Tasks\n"
        f"print(Tasks.find([{str(path)!r}], trust_code=True).definitions['mine'])"
    )
    there = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert there[-1] == here
    _module(tmp_path, "0.5")
    edited = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert edited[-1] != here


@pytest.mark.parametrize("lacking", [SOME, "None if doc['right'] else 1.0"])
def test_metrics_that_some_items_lack_are_those_of_the_others(lacking: str, model: SmeltLM, tmp_path: Path) -> None:
    """As lm-eval has them: bbq's are NaN for other categories, mgsm's left out; and one that metric_list does not name."""
    more = (
        "process_results: !function code.score\ndoc_to_text: text\nmetric_list: [{metric: acc, aggregation: nanmean}]\n"
    )
    path = _task(tmp_path, more)
    lines = [{"text": "The sky is", "ends": [" blue", " qzx"], "right": right} for right in (0, 1, 0)]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path.write_text(path.read_text().replace("metric_list: [{metric: acc}]\n", ""))
    _module(tmp_path, lacking)
    tasks = Tasks.find([str(path)], trust_code=True)
    found = {result.metric: result for result in tasks.run("mine", model, None)}
    assert found["acc"].value == 1.0
    assert found["acc"].by_item == [1.0, 1.0]
    assert found["more"].value == 1.0
    assert (found["acc"].data == found["more"].data) == ("nan" not in lacking)
    assert found["acc"].data != tasks.data["mine"]


def test_a_metric_that_is_in_one_part_only_is_kept(model: SmeltLM, tmp_path: Path) -> None:
    """What is answered in parts, for a guarantee, may have its items in one of them."""
    more = "process_results: !function code.score\ndoc_to_text: text\n"
    path = _task(tmp_path, more)
    lines = [{"text": "The sky is", "ends": [" blue", " qzx"], "right": right} for right in (0, 0, 1, 1)]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "code.py").write_text(
        "def score(doc, results):\n    return {'acc': 1.0, **({'rare': 0.5} if doc['right'] else {'nan': float('nan')})}\n"
    )
    tasks = Tasks.find([str(path)], trust_code=True)
    parts = [tasks.run("mine", model, None, items) for items in ([0, 1], [2, 3])]
    for ordered in (parts, parts[::-1]):
        found = {each.metric: each for each in tasks.together("mine", *ordered)}
        assert (found["acc"].items, found["rare"].items, found["rare"].value) == (4, 2, 0.5)
        assert "nan" not in found


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = []
    for name, prompt in (("one", "text"), ("two", "Really {{ text }}")):
        folder = tmp_path / name
        folder.mkdir()
        paths.append(str(_task(folder, f"doc_to_text: '{prompt}'\n")))
    with pytest.raises(SmeltError, match="its task 'mine' is called as another one that is asked for; rename"):
        Tasks.find(paths)
    assert list(Tasks.find([paths[0], paths[0]]).loaded) == ["mine"]
    other = tmp_path / "three"
    other.mkdir()
    copied = _task(other, "doc_to_text: 'text'\n")
    (other / "items.jsonl").write_text('{"text": "Snow is", "ends": [" white", " qzx"], "right": 0}\n')
    with pytest.raises(SmeltError, match="its task 'mine' is called as another one"):
        Tasks.find([paths[0], str(copied)])


def test_a_task_that_runs_what_the_model_writes_must_be_trusted(tmp_path: Path) -> None:
    path = str(_task(tmp_path, "doc_to_text: text\nunsafe_code: true\n"))
    with pytest.raises(SmeltError, match="mine: runs the code that the model writes, which is off by default"):
        Tasks.find([path])
    assert list(Tasks.find([path], trust_code=True).loaded) == ["mine"]


def test_an_edited_task_is_not_compared(model: SmeltLM, tmp_path: Path) -> None:
    found = []
    for prompt in ("text", "Really {{ text }}"):
        path = _task(tmp_path, f"doc_to_text: '{prompt}'\n")
        tasks = Tasks.find([str(path)])
        found.append(tasks.run("mine", model, None)[0])
    assert found[0].data == found[1].data
    assert not found[0].answers_the_same(found[1])
    assert found[0].answers_the_same(found[0])


def test_a_metric_has_lm_evals_name_of_its_aggregation(model: SmeltLM, tmp_path: Path) -> None:
    path = _task(tmp_path, "doc_to_text: text\n")
    path.write_text(path.read_text().replace("[{metric: acc}]", "[{metric: f1}]"))
    (result,) = Tasks.find([str(path)]).run("mine", model, None)
    assert result.aggregation == "f1"
    assert aggregation("f1") is not None
    assert aggregation("(mean)") is None


def test_generation_that_the_engine_does_not_have_is_found_before_anything_is_answered(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"text": "The sky is", "ends": "blue"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/items.jsonl}}\ntest_split: train\n"
        "output_type: generate_until\ndoc_to_text: text\ndoc_to_target: ends\nmetric_list: [{metric: exact_match}]\n"
        "generation_kwargs: {until: ['.'], num_beams: 4, min_new_tokens: 2}\n"
    )
    (problem,) = task_problems(Evaluate(), Tasks.find([str(path)]), [])
    assert "mine's generation_kwargs ask for num_beams, which the engine does not support" in str(problem)


def _with(tasks: list) -> ModelResult:  # type: ignore[type-arg]
    return report_samples.full().candidates[0].model_copy(update={"tasks": tasks, "against": Against()})


def _task(folder: Path, more: str, name: str = "mine") -> Path:
    """A task whose Python, if it runs, leaves a file behind."""
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n\n\ndef text(doc):\n    return doc['text']\n")
    (folder / "items.jsonl").write_text('{"text": "The sky is", "ends": [" blue", " qzx"], "right": 0}\n')
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {folder}/items.jsonl}}\n"
        "output_type: multiple_choice\ntest_split: train\ndoc_to_target: right\ndoc_to_choice: ends\n"
        f"metric_list: [{{metric: acc}}]\nmetadata: {{version: 1.0}}\n{more}"
    )
    return path


def _refused(path: Path) -> str:
    with pytest.raises(SmeltError) as caught:
        Tasks.find([str(path)])
    assert not (path.parent / "ran").exists()
    assert "trust_task_code: true" in str(caught.value)
    assert "--trust-task-code" in str(caught.value)
    return str(caught.value)


def test_python_of_a_task_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    path = _task(tmp_path, "doc_to_text: !function code.text\n")
    assert f"runs Python code, text of {tmp_path / 'code.py'}" in _refused(path)
    assert Tasks.find([str(path)], trust_code=True).loaded.keys() == {"mine"}
    assert (tmp_path / "ran").exists()


def test_python_of_what_a_task_includes_is_found(tmp_path: Path) -> None:
    (tmp_path / "base").write_text("include: deeper\n")
    (tmp_path / "deeper").write_text("doc_to_text: !function code.text\n")
    assert "code.py" in _refused(_task(tmp_path, "include: base\n"))


def test_python_of_a_groups_members_is_found(tmp_path: Path) -> None:
    _task(tmp_path, "doc_to_text: !function code.text\n")
    group = tmp_path / "group.yaml"
    group.write_text("group: both\ntask: [mine]\n")
    assert "code.py" in _refused(group)
    group.write_text("group: both\ntask:\n  - {task: other, doc_to_text: !function code.text}\n")
    assert "code.py" in _refused(group)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("class: !function code.text\n", "text of "),
        ("doc_to_text: !function os.system\n", "system of the module os"),
        ("doc_to_text: text\nmetric_list: [{metric: bleu, hf_evaluate: true}]\n", "the script of the metric 'bleu'"),
        ("doc_to_text: text\nmetric_list: [{metric: !function code.text}]\n", "text of "),
    ],
)
def test_other_ways_to_python(more: str, what: str, tmp_path: Path) -> None:
    path = _task(tmp_path, "")
    path.write_text(
        path.read_text().replace(
            "metric_list: [{metric: acc}]\n", "" if "metric_list" in more else "metric_list: [{metric: acc}]\n"
        )
        + more
    )
    assert what in _refused(path)


def test_a_template_reaches_nothing_but_the_item(tmp_path: Path) -> None:
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "ran") + "') }}"
    with pytest.raises(SmeltError, match="unsafe"):
        Tasks.find([str(_task(tmp_path, f'doc_to_text: "{template}"\n'))], trust_code=True)
    assert not (tmp_path / "ran").exists()


def test_tasks_that_ship_need_no_trust() -> None:
    assert Tasks.find(["smelt_last_word"]).loaded
