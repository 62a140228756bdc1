"""Intervals and tests against scipy, and against how often they hold."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats
from smelt.compress.results.statistics import (
    excludes,
    mean_interval,
    median_interval,
    resampled_interval,
    share_interval,
    sign_test,
)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 40, 1000])
def test_the_interval_of_a_mean_is_students(count: int) -> None:
    draw = random.Random(count)
    values = [draw.gauss(3, 2) for _ in range(count)]
    expected = stats.t.interval(0.95, count - 1, loc=stats.tmean(values), scale=stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (3, 10), (10, 10), (371, 1000)])
def test_the_interval_of_a_share_is_wilsons(hits: int, count: int) -> None:
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert share_interval(hits, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 6), (5, 12), (40, 41), (100, 60)])
def test_flipped_answers_are_tested_as_mcnemar_does(gained: int, lost: int) -> None:
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert sign_test(gained, lost) == pytest.approx(expected)


@pytest.mark.parametrize("count", [6, 7, 10, 40])
def test_the_interval_of_a_median_is_the_sign_tests(count: int) -> None:
    draw = random.Random(count)
    values = [draw.gauss(1, 1) for _ in range(count)]
    low, high = median_interval(values) or (0.0, 0.0)
    below, above = sorted(values).index(low), count - 1 - sorted(values).index(high)
    assert below == above
    assert stats.binomtest(below, count).pvalue <= 0.05 < stats.binomtest(below + 1, count).pvalue


def test_few_rounds_claim_nothing_about_a_median() -> None:
    assert median_interval([1.1, 1.2, 1.1, 1.15, 1.12]) is None


def test_intervals_hold_about_as_often_as_they_say() -> None:
    draw = random.Random(0)
    hits = {"mean": 0, "resampled": 0}
    for _ in range(400):
        values = [draw.gauss(0.02, 0.1) for _ in range(40)]
        for name, bounds in (
            ("mean", mean_interval(values)),
            ("resampled", resampled_interval(values, lambda part: sum(part) / len(part))),
        ):
            assert bounds is not None
            hits[name] += bounds[0] <= 0.02 <= bounds[1]
    assert 0.92 < hits["mean"] / 400 < 0.98
    assert 0.90 < hits["resampled"] / 400 < 0.98


def test_resampling_finds_the_spread_of_a_ratio() -> None:
    """Against the delta method."""
    draw = random.Random(1)
    pairs = [(draw.uniform(1, 2), draw.uniform(2, 4)) for _ in range(400)]
    low, high = resampled_interval(pairs, lambda part: sum(b for _, b in part) / sum(a for a, _ in part)) or (0, 0)
    a, b = (sum(p[i] for p in pairs) / 400 for i in (0, 1))
    variance = sum(((y - b / a * x) / a) ** 2 for x, y in pairs) / 400 / 400
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(variance), rel=0.1)


def test_too_little_has_no_interval_and_no_significance() -> None:
    assert mean_interval([0.5]) is None
    assert share_interval(0, 0) is None
    assert resampled_interval([1.0], sum) is None
    assert resampled_interval([1.0, 2000.0], lambda part: math.exp(max(part))) is None
    assert excludes(None, 1.0) is None
    assert excludes((0.9, 1.1), 1.0) is False
    assert excludes((1.01, 1.1), 1.0) is True
