"""An evaluation ends where what is guaranteed is known, and is otherwise the same as a whole one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from smelt.compress import Evaluate, Recipe, evaluate, run
from smelt.compress.evaluation import measure
from smelt.compress.evaluation.early_stop import FIRST, parts
from smelt.compress.evaluation.guarantee import Guarantee, guaranteed, planned
from smelt.compress.results.betting import upper_bound
from smelt.compress.results.report import ReportData
from smelt.compress.results.result import TaskResult

from .test_guarantee import model, task

TASK = "smelt_continuation"
BASE: dict[str, Any] = {"windows": 4, "length": 64, "samples": 0, "speed": False, "tasks": [TASK], "limit": 150}


@pytest.fixture(scope="module")
def w4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = {
        "model": "builtin:smelt-6m",
        "output": str(tmp_path_factory.mktemp("w4") / "w4"),
        "steps": [{"quantize": {"scheme": "W4A16", "group_size": 64, "rounding": "nearest"}}],
        "evaluate": False,
    }
    return run(Recipe.model_validate(recipe)).checkpoint


@pytest.fixture(scope="module")
def whole(w4: Path, tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    settings = Evaluate.model_validate(BASE | {"windows": 200, "length": 32})
    return evaluate([w4], baseline="builtin:smelt-6m", settings=settings, output=tmp_path_factory.mktemp("whole"))


def _with(w4: Path, output: Path, *claims: str, **changes: Any) -> ReportData:
    settings = Evaluate.model_validate(BASE | {"guarantee": list(claims)} | changes)
    return evaluate([w4], baseline="builtin:smelt-6m", settings=settings, output=output)


def test_parts_are_all_items_once_and_double() -> None:
    found = list(parts(1000))
    assert sorted(item for part in found for item in part) == list(range(1000))
    assert [len(part) for part in found] == [64, 64, 128, 256, 488]
    assert found == list(parts(1000))
    assert found[0] != list(range(64)), "they are drawn at random"
    assert list(parts(30)) == [list(range(30))]


@pytest.mark.slow
def test_a_task_stops_where_its_claims_are_known(w4: Path, whole: ReportData, tmp_path: Path) -> None:
    report = _with(w4, tmp_path, "acc loss <= 15% @95%")
    every = {each.metric: each for each in whole.models[1].tasks}
    (known,) = report.models[1].against.guarantees  # type: ignore[union-attr]
    assert known.verdict == "certified"
    assert known.of == every["acc"].items
    assert known.items < known.of
    assert f"over {known.items} items of {known.of}, the others were not needed" in known.sentence()
    order: list[int] = []
    for part in parts(known.of):
        if len(order) < known.items:
            order += part
    for before, after in zip(whole.models, report.models, strict=True):
        for one, other in zip(before.tasks, after.tasks, strict=True):
            assert (one.metric, other.of) == (other.metric, one.items)
            assert other.by_item == [one.by_item[item] for item in order]
            assert other.value == pytest.approx(sum(other.by_item) / len(order))
    losses = [a - b for a, b in zip(*(m.tasks[0].by_item for m in report.models), strict=True)]
    assert known.at_most == pytest.approx(upper_bound(losses, -1.0, 1.0, 0.05))


@pytest.mark.slow
def test_what_stays_undecided_is_measured_as_a_whole_also_after_an_interruption(
    w4: Path, whole: ReportData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []
    answer = measure.Tasks.run

    def counted(self: Any, name: str, *rest: Any) -> list[TaskResult]:
        if len(answered) == 3:
            answered.append(0)
            raise KeyboardInterrupt
        answered.append(len(rest[-1]))
        return answer(self, name, *rest)

    monkeypatch.setattr(measure.Tasks, "run", counted)
    claim = "acc loss <= 0.1% @95%"
    with pytest.raises(KeyboardInterrupt):
        _with(w4, tmp_path, claim)
    report = _with(w4, tmp_path, claim)
    assert report.status == "complete"
    assert [each.verdict for each in report.models[1].against.guarantees] == ["undecided"]  # type: ignore[union-attr]
    for before, after in zip(whole.models, report.models, strict=True):
        assert after.tasks == before.tasks
    # Each part by two models, one of them in two attempts.
    sizes = [len(part) for part in parts(report.models[0].tasks[0].items)]
    assert sorted(answered) == sorted([*sizes, *sizes, 0])


@pytest.mark.slow
def test_windows_stop_too(w4: Path, whole: ReportData, tmp_path: Path) -> None:
    text = {"windows": 200, "length": 32, "tasks": []}
    report = _with(w4, tmp_path / "a", "ppl loss <= 20% @90%", "kl <= 0.2 @90%", **text)
    first, last = (each.text for each in report.models)
    assert first is not None
    assert last is not None
    assert last.of == 200
    assert last.windows == FIRST
    of_all = whole.models[1].text
    assert of_all is not None
    (chosen, *_) = parts(200)
    assert last.nll == pytest.approx([of_all.nll[i] for i in chosen], abs=1e-4)
    against = report.models[1].against
    assert against is not None
    ppl, kl = against.guarantees
    assert (ppl.what, kl.what, ppl.verdict, kl.verdict) == ("ppl", "kl", "certified", "certified")
    assert against.kl == pytest.approx(kl.loss)
    assert kl.at_least < kl.loss < kl.at_most <= 0.2
    assert "nats over 64 windows of 200" in kl.sentence()

    report = _with(w4, tmp_path / "b", "ppl loss <= 0.01% @95%", **text)
    for before, after in zip(whole.models, report.models, strict=True):
        assert before.text is not None
        assert after.text is not None
        assert after.text.nll == pytest.approx(before.text.nll, abs=1e-4)
        assert after.text.perplexity == pytest.approx(before.text.perplexity, rel=1e-5)
        assert after.text.text_sha256 == before.text.text_sha256


def test_tasks_that_are_neither_right_nor_wrong_are_measured_as_a_whole(w4: Path, tmp_path: Path) -> None:
    report = _with(w4, tmp_path, "acc loss <= 50% @95%", tasks=["smelt_text"], limit=5)
    assert report.status == "complete"
    assert all(each.of is None for model in report.models for each in model.tasks)
    assert report.models[1].against.guarantees == []  # type: ignore[union-attr]


def test_claims_to_come_share_the_probability_of_an_error() -> None:
    right = [1, 0] * 500
    claims = [Guarantee.parse("acc loss <= 5%"), Guarantee.parse("task:boolq loss <= 5%"), Guarantee.parse("kl <= 0.1")]
    assert planned(claims, ["piqa", "boolq"], 2) == 2 * (2 + 1 + 1)
    (found,) = guaranteed(model("before", task(right)), [model("after", task(right))], claims[:1], planned=8)["after"]
    assert found.claims == 8
    assert found.at_most == pytest.approx(upper_bound([0.0] * 1000, -1.0, 1.0, 0.05 / 8))


def test_claims_on_groups_share_it_too() -> None:
    """A group's own value is claimed of in the report, so its claim must have been counted when its tasks stopped."""
    assert planned([Guarantee.parse("acc loss <= 5%")], ["one", "other", "both"], 1) == 3


def test_divergence_is_bounded_if_no_window_has_more_than_a_nat() -> None:
    claim = Guarantee.parse("kl <= 0.05 @90%")
    assert (claim.what, claim.limit) == ("kl", 0.05)
    values = [0.01] * 399 + [1.0]
    (found,) = guaranteed(model("before"), [model("after")], [claim], kl={"after": values})["after"]
    assert found.verdict == "certified"
    assert found.at_most == pytest.approx(upper_bound([0.01] * 399 + [1.0], 0.0, 1.0, 0.1))
    assert math.isclose(found.loss, (399 * 0.01 + 1.0) / 400)
    assert found.sentence().startswith(
        "certified: the KL divergence is at most 0.05 nats (0.0125 nats over 400 windows"
    )
    (found,) = guaranteed(model("before"), [model("after")], [claim], kl={"after": [0.01] * 399 + [50.0]})["after"]
    assert (found.verdict, found.loss) == ("undecided", pytest.approx(53.99 / 400))
    (found,) = guaranteed(model("before"), [model("after")], [claim], kl={"after": [0.2] * 400})["after"]
    assert found.verdict == "refuted"
