"""Claims on losses: read, settled, and said."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from smelt.compress import Evaluate, Recipe, SmeltError, evaluate, run
from smelt.compress.cli import app
from smelt.compress.commands.common.outcome import not_certified
from smelt.compress.evaluation.against import against, incomparable
from smelt.compress.evaluation.guarantee import Guarantee, guaranteed, uncompared
from smelt.compress.results.betting import lower_bound, upper_bound
from smelt.compress.results.report import ReportData
from smelt.compress.results.result import Guaranteed, ModelResult, TaskResult, Text
from typer.testing import CliRunner

from ...tiny import REPOSITORY
from .. import report_samples


def task(right: list[int], name: str = "piqa", *, better: bool = True) -> TaskResult:
    return TaskResult(
        task=name, metric="acc", filter="none", value=sum(right) / len(right), higher_is_better=better, aggregation="mean",
        items=len(right), by_item=right, fewshot=0, version="1",
    )  # fmt: skip


def model(name: str, *tasks: TaskResult, nll: list[float] | None = None) -> ModelResult:
    text = None
    if nll is not None:
        text = Text(
            source="a text", windows=len(nll), length=11, perplexity=1.0, bits_per_byte=1.0, nll=nll, bytes=[50] * len(nll),
            text_sha256="same", source_sha256="same", computed_by="this test",
        )  # fmt: skip
    return ModelResult(
        name=name, role="candidate", path=name, fingerprint=name, scheme="plain", tasks=list(tasks), text=text
    )


@pytest.mark.parametrize(
    ("text", "what", "limit", "confidence"),
    [
        ("acc loss <= 1% @95%", "acc", 0.01, 0.95),
        ("task:piqa loss<=0.5%", "task:piqa", 0.005, 0.95),
        (" ppl loss <= 2% @ 99.5%", "ppl", 0.02, 0.995),
    ],
)
def test_claims_are_read(text: str, what: str, limit: float, confidence: float) -> None:
    found = Guarantee.parse(text)
    assert (found.what, found.limit, found.confidence) == (what, pytest.approx(limit), pytest.approx(confidence))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("acc >= 1%", "expected acc, ppl or task:NAME"),
        ("acc loss <= 1", "expected acc, ppl or task:NAME"),
        ("acc loss <= 1% @100%", "the confidence must be"),
        ("acc loss <= 0%", "the loss must be above 0%"),
        ("kl loss <= 1%", "expected acc, ppl or task:NAME"),
        ("kl <= 2", "the divergence must be above 0 and below 1 nats"),
    ],
)
def test_what_is_no_claim_is_refused(text: str, says: str) -> None:
    with pytest.raises(SmeltError, match=re.escape(says)):
        Guarantee.parse(text)


def test_each_verdict_comes_where_it_should() -> None:
    right = [1, 0] * 1000
    same, few_lost, many_lost = right, [0] * 40 + right[40:], [0] * 400 + right[400:]
    claims = [Guarantee.parse("acc loss <= 5%")]
    models = [model("same", task(same)), model("few", task(few_lost)), model("many", task(many_lost))]
    found = guaranteed(model("before", task(right)), models, claims)
    verdicts = {name: of_model[0].verdict for name, of_model in found.items()}
    assert verdicts == {"same": "certified", "few": "certified", "many": "refuted"}
    (few,) = found["few"]
    assert few.loss == pytest.approx(20 / 2000)
    # Three claims share the probability of an error.
    losses = [1.0] * 20 + [0.0] * 1980
    assert few.at_most == pytest.approx(upper_bound(losses, -1.0, 1.0, 0.05 / 3))
    assert few.smallest < few.at_most
    assert few.sentence().startswith("certified: piqa loses at most 5% (+1.00% over 2,000 items; at most ")
    assert "with all 3 claims" in few.sentence()


def test_too_few_items_say_how_many_are_missing() -> None:
    right = [1, 0] * 50
    beside = [model("after", task([0, 0, *right[2:]]))]
    (found,) = guaranteed(model("before", task(right)), beside, [Guarantee.parse("acc loss <= 5%")])["after"]
    assert found.verdict == "undecided"
    assert found.smallest > 0.02
    assert found.more_items is not None
    assert f"needs about {found.more_items:,} more items" in found.sentence()
    beside = [model("after", task([0] * 10 + right[10:]))]
    (found,) = guaranteed(model("before", task(right)), beside, [Guarantee.parse("acc loss <= 5%")])["after"]
    assert found.more_items is None
    assert "more items like these would not certify it" in found.sentence()


def test_a_gain_is_a_loss_where_less_is_better() -> None:
    right = [1, 0] * 1000
    beside = [model("after", task([1] * 400 + right[400:], better=False))]
    (found,) = guaranteed(model("before", task(right, better=False)), beside, [Guarantee.parse("acc loss <= 5%")])[
        "after"
    ]
    assert found.verdict == "refuted"


def sample() -> ReportData:
    return report_samples.report([report_samples.baseline()])


def text_claim(claim: str, losses: list[float]) -> Guaranteed:
    """Of a model that loses so many nats a token in each window."""
    before, after = [30.0] * len(losses), [30.0 + 10 * each for each in losses]
    beside = [model("after", nll=after)]
    (found,) = guaranteed(model("before", nll=before), beside, [Guarantee.parse(claim)])["after"]
    return found


def test_perplexity_is_bounded_if_no_window_loses_more_than_a_nat() -> None:
    losses = [math.log(1.01)] * 399 + [0.9]
    found = text_claim("ppl loss <= 5%", losses)
    assert found.verdict == "certified"
    assert found.at_most == pytest.approx(math.expm1(upper_bound(losses, -1.0, 1.0, 0.05)))
    assert found.sentence().endswith("with 95%, if none would lose more than 1 nat a token)")


def test_a_window_that_lost_more_than_it_counts_certifies_nothing() -> None:
    losses = [0.005] * 1980 + [8.0] * 20
    found = text_claim("ppl loss <= 5%", losses)
    assert math.expm1(math.fsum(losses) / 2000) > 0.08
    assert (found.verdict, found.more_items) == ("undecided", None)
    assert found.loss == pytest.approx(math.expm1(math.fsum(losses) / 2000))
    assert text_claim("ppl loss <= 1%", [0.1] * 1000 + [8.0]).verdict == "refuted"
    assert text_claim("ppl loss <= 1%", [0.1] * 1000 + [-8.0]).verdict == "undecided"


def test_both_ends_hold_together_where_nothing_is_decided() -> None:
    right = [1, 0] * 50
    beside = [model("after", task([0, 0, *right[2:]]))]
    (found,) = guaranteed(model("before", task(right)), beside, [Guarantee.parse("acc loss <= 5%")])["after"]
    losses = [1.0, *[0.0] * 99]
    assert found.at_most == pytest.approx(upper_bound(losses, -1.0, 1.0, 0.025))
    assert found.at_least == pytest.approx(lower_bound(losses, -1.0, 1.0, 0.025))


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ("acc loss <= 99% @99.9%", "with 99.9%)"),
        ("acc loss <= 40.004% @97.5%", "piqa loses at most 40.004% ("),
    ],
)
def test_it_is_said_as_it_was_claimed(claim: str, says: str) -> None:
    right = [1, 0] * 1000
    (found,) = guaranteed(model("before", task(right)), [model("after", task(right))], [Guarantee.parse(claim)])[
        "after"
    ]
    assert says in found.sentence()


def test_a_task_that_cannot_be_compared_is_not_certified(capsys: pytest.CaptureFixture[str]) -> None:
    right = [1, 0] * 500
    claim = Guarantee.parse("acc loss <= 5%")
    other = task(right, "arc").model_copy(update={"data": "other items"})
    before = model(
        "before", task(right), task(right[:100], "boolq"), task(right, "arc").model_copy(update={"data": "items"})
    )
    after = model("after", task(right), task(right, "boolq"), other)
    beside = against(before, after, sample().machine)
    known = guaranteed(before, [after], [claim])["after"]
    assert [each.what for each in known] == ["piqa"]
    after = after.model_copy(update={"against": beside.model_copy(update={"guarantees": known})})
    assert uncompared(before, after, claim) == ["boolq", "arc"]
    said = incomparable(before, after, beside)
    assert [sentence.split(" is not compared")[0] for sentence in said] == ["boolq", "arc"]
    of_both = sample().model_copy(update={"models": [before.model_copy(update={"role": "baseline"}), after]})
    assert not_certified(of_both, [claim.text]) == 1
    assert "boolq of after is not compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        (["ppl loss <= 2% @99%", "kl <= 0.1 @50%"], "has 2 confidences"),
        (
            ["task:smelt_last_wrd loss <= 2%"],
            "is about smelt_last_wrd, which is none of the tasks; did you mean smelt_last_word",
        ),
    ],
)
def test_claims_that_cannot_be_kept_are_refused_before_anything_is_measured(
    claims: list[str], says: str, recipe: object, tiny: object, tmp_path: Path
) -> None:
    settings = {"tasks": ["smelt_last_word"], "speed": False, "samples": 0, "guarantee": claims}
    with pytest.raises(SmeltError, match=re.escape(says)):
        run(recipe(tiny(), {"evaluate": settings}, group_size=32), progress=False)  # type: ignore[operator]
    with pytest.raises(SmeltError, match=re.escape(says)):
        evaluate(
            [tiny()],  # type: ignore[operator]
            baseline="builtin:smelt-6m",
            settings=Evaluate.model_validate(settings),
            output=tmp_path / "e",
        )


def test_a_recipe_whose_claims_are_not_certified_ends_with_status_1(tmp_path: Path) -> None:
    given = {"evaluate.windows": 4, "evaluate.length": 32, "evaluate.speed": False, "evaluate.tasks": [], "evaluate.samples": 0,
             "calibrate.samples": 4, "calibrate.length": 32, "evaluate.guarantee": ["ppl loss <= 1%"]}  # fmt: skip
    sets = [part for name, value in given.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    path = str(REPOSITORY / "recipes/quickstart.yaml")
    done = CliRunner().invoke(app, ["run", path, "--output", str(tmp_path / "out"), *sets])
    assert done.exit_code == 1
    assert "guarantee 'ppl loss <= 1%' of W4A16 g64 gptq is not certified: undecided" in done.stderr


def test_a_command_that_cannot_certify_fails_and_says_so(tmp_path: Path) -> None:
    command = ["eval", "builtin:smelt-6m", "--output", str(tmp_path / "out"), "--speed", "none", "--samples", "0"]
    alone = CliRunner().invoke(app, [*command, "--guarantee", "ppl loss <= 2%"])
    assert alone.exit_code == 1
    assert "give it with --baseline" in alone.output
    bad = CliRunner().invoke(app, [*command, "--baseline", "builtin:smelt-6m", "--guarantee", "acc loss <= 2%"])
    assert bad.exit_code == 1
    assert "is about tasks, and none is measured" in bad.output


def test_a_recipe_reports_it(recipe: object, tiny: object, tmp_path: Path) -> None:
    top = {"evaluate": {"windows": 16, "length": 32, "speed": False, "samples": 0, "guarantee": ["ppl loss <= 99%"]}}
    made: Recipe = recipe(tiny(), top, group_size=32)  # type: ignore[operator]
    found = run(made, progress=False).report
    (known,) = found.candidates[0].against.guarantees  # type: ignore[union-attr]
    assert known.items == 16
    assert known.sentence() in found.summary()
    out = tmp_path / "out"
    assert "## Guarantees" in (out / "report.md").read_text()
    assert "Guarantees" in (out / "report.html").read_text()
    data = json.loads((out / "report.json").read_text())
    assert data["models"][1]["against"]["guarantees"][0]["verdict"] == known.verdict
