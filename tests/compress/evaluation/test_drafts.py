"""``smelt eval --drafter``: what speculative decoding gains, beside counts from an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smelt.compress import Evaluate, Recipe, SmeltError, evaluate, run
from smelt.compress.evaluation.drafts import EvaluatedDrafter
from smelt.compress.evaluation.gates import Gate
from smelt.compress.evaluation.settings import SpeedSettings
from smelt.compress.results.result import Change, DraftedLoad, DraftedSpeed, Spread
from smelt.models.text.text_source import TextSource
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.measure.workload import text_prompts

from ...tiny import SMELT_6M
from ..report_samples import full

LOAD = SpeedSettings(prompt=24, generate=12, concurrency=[1, 2], repeats=1)
SETTINGS = Evaluate(windows=2, length=32, samples=0, speed=LOAD)


@pytest.mark.slow
def test_lookup_is_measured_with_every_model(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"drafter": "lookup"})
    report = evaluate(["builtin:smelt-6m"], settings=settings, output=tmp_path / "out")
    (model,) = report.models
    found = model.drafts
    assert report.status == "complete"
    assert found is not None
    assert found.drafter == "lookup"
    assert [load.concurrency for load in found.loads] == [1, 2]
    for load in found.loads:
        assert load.requests == load.concurrency
        assert load.same_answers == load.requests
        assert load.speedup.ratio == pytest.approx(load.drafted.median / load.alone.median)
    page, words = (tmp_path / "out/report.html").read_text(), (tmp_path / "out/report.md").read_text()
    assert "drafted by lookup" in words
    assert "Speculative decoding" in page
    assert any(line.startswith("drafts:   ") for line in report.summary().splitlines())

    again = evaluate(["builtin:smelt-6m"], settings=settings, output=tmp_path / "out")
    assert again.models[0].drafts == found, "it was measured again"


@pytest.mark.slow
def test_in_a_recipe_the_result_drafts_for_the_original(recipe: Callable[..., Recipe]) -> None:
    """Prompts are those of the text, and acceptance is that of an engine that drafts as many."""
    top: dict[str, Any] = {"evaluate": SETTINGS.model_copy(update={"drafter": "result"}).model_dump()}
    result = run(recipe("builtin:smelt-6m", top, scheme="W4A16", group_size=64, rounding="nearest"))
    original, compressed = result.report.models
    assert compressed.drafts is None
    assert original.drafts is not None
    assert original.drafts.drafter == compressed.name
    load = original.drafts.loads[0]
    assert load.same_answers == load.requests
    if load.tokens_per_verification is None or len(load.accepted_by_position) < 1:
        return  # a machine on which drafting never pays
    engine = Engine(SMELT_6M, drafter=str(result.checkpoint), draft_tokens=2)
    prompts = text_prompts(engine.tokenizer, 24, TextSource("builtin", "evaluation"))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for seed in range(12):
        engine.generate(prompts(24, seed), params)
    assert engine.drafting is not None
    alike = engine.drafting.total.by_position()[0]
    engine.close()
    assert alike > 0.6
    assert load.accepted_by_position[0] > 0.3, "text of a model of words is drafted well by its own 4-bit form"


@pytest.mark.slow
def test_in_a_recipe_the_result_drafts_what_is_not_looked_up(recipe: Callable[..., Recipe]) -> None:
    top: dict[str, Any] = {"evaluate": SETTINGS.model_copy(update={"drafter": "lookup+result"}).model_dump()}
    result = run(recipe("builtin:smelt-6m", top, scheme="W4A16", group_size=64, rounding="nearest"))
    original, compressed = result.report.models
    assert compressed.drafts is None
    assert original.drafts is not None
    assert original.drafts.drafter == f"lookup+{compressed.name}"
    assert all(load.same_answers == load.requests for load in original.drafts.loads)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["early-exit:2", "lookup+early-exit:2"])
def test_layers_that_ranks_divide_are_measured(drafter: str, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"drafter": drafter, "tp": 2})
    report = evaluate(["builtin:smelt-6m"], settings=settings, output=tmp_path / "out")
    found = report.models[0].drafts
    assert found is not None
    assert found.drafter == drafter
    assert all(load.same_answers == load.requests for load in found.loads)


def test_what_is_measured_with_another_drafter_is_not_found_again(tmp_path: Path) -> None:
    model = str(SMELT_6M)
    names = ["lookup", "nested", "lookup+nested", model, f"lookup+{model}"]
    found = [EvaluatedDrafter.find(name, trust_remote_code=False) for name in names]
    assert len({each.identity for each in found}) == len(names)
    assert [each.given for each in found] == names


@pytest.mark.slow
def test_a_model_that_a_drafter_does_not_fit_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"drafter": "nested"})
    report = evaluate(["builtin:smelt-6m"], settings=settings, output=tmp_path / "out")
    assert report.status == "complete"
    assert report.models[0].speed is not None
    assert report.models[0].drafts is None
    (warning,) = [each for each in report.warnings if "drafts" in each]
    assert "quantize it with scheme W4in8" in warning


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"drafter": "nowhere"}, "drafter: .*nowhere.*; it must be lookup, nested, early-exit:N or a checkpoint"),
        ({"drafter": "result"}, "drafter: .*it must be lookup, nested, early-exit:N or a checkpoint"),
        ({"drafter": "lookup", "speed": False}, "drafter: is measured with the speed's loads"),
        ({"drafter": "lookup+nowhere"}, "drafter: .*nowhere.*; it must be lookup, .*, or lookup\\+ before one"),
        ({"drafter": "lookup+builtin:smelt-6m"}, "there is no model that it could draft for"),
        ({"drafter": "builtin:smelt-6m"}, "there is no model that it could draft for"),
    ],
)
def test_bad_drafters_are_reported_before_any_work(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match=sentence):
        evaluate(["builtin:smelt-6m"], settings=Evaluate.model_validate(settings), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ratios", "stops", "words"),
    [
        ({1: 1.5, 4: 1.1, 8: 1.01}, None, "with each of"),
        ({1: 1.5, 4: 1.1, 8: 0.9}, 8, "from 8 requests at once on"),
        ({1: 1.5, 4: 0.99, 8: 1.02, 16: 0.9}, 16, "with 1, 8 at once, and with no other"),
        ({1: 0.97, 4: 1.06}, None, "with 4 at once, and with no other"),
        ({1: 0.9, 8: 0.8}, 1, "with any of"),
    ],
)
def test_where_drafts_stop_paying(ratios: dict[int, float], stops: int | None, words: str) -> None:
    loads = [_load(concurrency, ratio) for concurrency, ratio in ratios.items()]
    found = DraftedSpeed(drafter="lookup", prompt=8, generate=8, loads=loads)
    assert found.stops_paying == stops
    assert words in found.verdict


def test_a_gain_within_noise_is_none() -> None:
    loads = [_load(1, 1.5), _load(4, 1.06)]
    noisy = loads[1].speedup.model_copy(update={"significant": False})
    loads[1] = loads[1].model_copy(update={"speedup": noisy})
    found = DraftedSpeed(drafter="lookup", prompt=8, generate=8, loads=loads)
    assert found.stops_paying == 4
    assert "from 4 requests at once on" in found.verdict


def test_a_gate_on_drafts_is_about_the_model_that_is_drafted_for() -> None:
    report = full()
    drafted = DraftedSpeed(drafter="W4", prompt=8, generate=8, loads=[_load(1, 1.5), _load(8, 0.9)])
    original, *others = report.models
    report = report.model_copy(update={"models": [original.model_copy(update={"drafts": drafted}), *others]})
    assert Gate.parse("draft_speedup<0.8").fallen(report) == []
    (sentence,) = Gate.parse("draft_speedup<1").fallen(report)
    assert f"{original.name} has draft_speedup 0.9" in sentence
    assert "was not measured" in Gate.parse("draft_speedup<1").fallen(full())[0]


def _load(concurrency: int, ratio: float) -> DraftedLoad:
    alone, drafted = (Spread(median=rate, values=[rate]) for rate in (100.0, 100.0 * ratio))
    change = Change(ratio=ratio)
    return DraftedLoad(
        concurrency=concurrency, alone=alone, drafted=drafted, speedup=change, requests=1, same_answers=1
    )
