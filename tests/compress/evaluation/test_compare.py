"""Two reports beside each other."""

from __future__ import annotations

import pytest
from smelt.compress import SmeltError
from smelt.compress.evaluation.compare import compare
from smelt.compress.results.report import ReportData

from ..report_samples import full, minimal


def test_models_of_the_same_name_are_compared() -> None:
    before, after = full(), _faster(full(), 1.25)
    found = compare(before, after)
    assert [report.candidates[0].name for report in found] == [f"{model.name} (after)" for model in before.candidates]
    for report in found:
        against = report.candidates[0].against
        assert against is not None
        assert against.decode is not None
        assert against.decode.ratio == pytest.approx(1.25)
        assert against.decode.interval is None, "not measured in turns"
        assert against.perplexity is not None
        assert against.perplexity.ratio == pytest.approx(1.0)
        assert against.size is not None
        assert against.size.ratio == 1
        assert any("different runs" in sentence for sentence in report.warnings)


def test_two_single_models_are_compared_whatever_their_names() -> None:
    one = minimal()
    other = one.model_copy(update={"models": [one.models[0].model_copy(update={"name": "another"})]})
    (report,) = compare(one, other)
    assert [model.name for model in report.models] == [f"{one.models[0].name} (before)", "another"]


def test_speeds_of_different_machines_are_refused_unless_allowed() -> None:
    before, after = full(), full()
    after = after.model_copy(update={"machine": after.machine.model_copy(update={"processor": "Another 9000"})})
    with pytest.raises(SmeltError, match=r"different machines \(processor .*Another 9000"):
        compare(before, after)
    found = compare(before, after, allow_foreign_baseline=True)
    assert any("different machines" in sentence for sentence in found[0].warnings)


def test_reports_with_nothing_in_common_are_an_error() -> None:
    other = full()
    renamed = [model.model_copy(update={"name": model.name + "!"}) for model in other.models]
    with pytest.raises(SmeltError, match="no model of the same name"):
        compare(full(), other.model_copy(update={"models": renamed}))


def _faster(report: ReportData, factor: float) -> ReportData:
    models = []
    for model in report.models:
        speed = model.speed
        if speed is not None:
            rate = speed.decode_rate
            quicker = rate.model_copy(
                update={"median": rate.median * factor, "values": [value * factor for value in rate.values]}
            )
            speed = speed.model_copy(update={"decode_rate": quicker})
        models.append(model.model_copy(update={"speed": speed}))
    return report.model_copy(update={"models": models})
