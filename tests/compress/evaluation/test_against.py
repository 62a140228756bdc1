"""A model beside the baseline."""

from __future__ import annotations

import statistics

import pytest
from smelt.compress.evaluation.against import against
from smelt.compress.results import terminal
from smelt.compress.results.result import ModelResult, Spread

from ..report_samples import baseline, candidate, machine


def _decoding(model: ModelResult, values: list[float]) -> ModelResult:
    assert model.speed is not None
    rates = Spread(median=statistics.median(values), values=values)
    return model.model_copy(update={"speed": model.speed.model_copy(update={"decode_rate": rates})})


def test_the_speedup_of_turns_is_reported_everywhere() -> None:
    # In every second turn the machine is twice as fast for both; the medians' ratio is 1.4.
    before = _decoding(baseline(), [10.0, 20.0, 10.0, 20.0, 10.0, 20.0])
    after = _decoding(candidate("W4A16", 4.25, 1.01, 1.5, 1.1), [15.0, 30.0, 18.0, 30.0, 18.0, 24.0])
    found = against(before, after, machine())
    assert found.decode is not None
    assert found.decode.ratio == pytest.approx(1.5)
    assert any("1.50× was measured" in sentence for sentence in found.reasons)
    lines = terminal.beside(before, after.model_copy(update={"against": found}), colour=False)
    assert any("decode 15.0 -> 21.0 tokens/s (1.5× faster, 95% 1.20× to 1.80×)" in line for line in lines)
