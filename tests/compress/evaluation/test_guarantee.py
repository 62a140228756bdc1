"""Claims on losses: read, settled, and said."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.cli import app
from smelt.compress.evaluation.guarantee import Guarantee, guaranteed
from smelt.compress.results.betting import upper_bound
from smelt.compress.results.result import ModelResult, TaskResult, Text
from typer.testing import CliRunner


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
    assert few.sentence().startswith("certified: piqa loses at most 5.00% (+1.00% over 2,000 items; at most ")
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


def test_perplexity_is_bounded_by_windows_of_which_each_counts_so_much() -> None:
    before, after = [30.0] * 400, [30.0 + 10 * math.log(1.01)] * 399 + [30.0 + 1e6]
    (found,) = guaranteed(
        model("before", nll=before), [model("after", nll=after)], [Guarantee.parse("ppl loss <= 5%")]
    )["after"]
    assert found.verdict == "certified"
    losses = [math.log(1.01)] * 399 + [1.0]
    assert found.at_most == pytest.approx(math.expm1(upper_bound(losses, -1.0, 1.0, 0.05)))


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
