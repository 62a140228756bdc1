"""Intervals and tests against their definitions, and against how often they hold."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence

import pytest
from smelt.compress.results.statistics import (
    excludes,
    mean_interval,
    median_interval,
    paired_interval,
    resampled_interval,
    share_interval,
    sign_test,
)


def _students_within(bound: float, freedom: int) -> float:
    """The probability that Student's t lies in ±``bound``, by Simpson's rule."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    steps = 20_000
    weights = [1, *([4, 2] * (steps // 2))[:-1], 1]
    points = (bound * i / steps for i in range(steps + 1))
    densities = (scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in points)
    return 2 * math.fsum(w * d for w, d in zip(weights, densities, strict=True)) * bound / steps / 3


def _few_heads(most: int, coins: int) -> float:
    return sum(math.comb(coins, k) for k in range(most + 1)) / 2**coins


@pytest.mark.parametrize("count", [2, 3, 4, 8, 40, 1000])
def test_the_interval_of_a_mean_is_students(count: int) -> None:
    draw = random.Random(count)
    values = [draw.gauss(3, 2) for _ in range(count)]
    low, high = mean_interval(values) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(statistics.mean(values))
    bound = (high - low) / 2 / (statistics.stdev(values) / math.sqrt(count))
    assert _students_within(bound, count - 1) == pytest.approx(0.95, abs=1e-8)


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (3, 10), (10, 10), (371, 1000)])
def test_the_interval_of_a_share_is_wilsons(hits: int, count: int) -> None:
    """The shares from which the found one is just 1.96 standard deviations, of that share, away."""
    bounds = share_interval(hits, count)
    assert bounds is not None
    z = statistics.NormalDist().inv_cdf(0.975)
    for p in bounds:
        assert (hits / count - p) ** 2 == pytest.approx(z * z * p * (1 - p) / count, abs=1e-12)
    assert bounds[0] <= hits / count <= bounds[1]
    assert bounds[0] < bounds[1]


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 6), (5, 12), (40, 41), (100, 60)])
def test_flipped_answers_are_tested_as_mcnemar_does(gained: int, lost: int) -> None:
    """All splits of as many coins that are no likelier than this one."""
    coins = gained + lost
    as_uneven = sum(ways for k in range(coins + 1) if (ways := math.comb(coins, k)) <= math.comb(coins, gained))
    assert sign_test(gained, lost) == pytest.approx(as_uneven / 2**coins)


@pytest.mark.parametrize("count", [6, 7, 10, 40])
def test_the_interval_of_a_median_is_the_sign_tests(count: int) -> None:
    draw = random.Random(count)
    values = [draw.gauss(1, 1) for _ in range(count)]
    low, high = median_interval(values) or (0.0, 0.0)
    below, above = sorted(values).index(low), count - 1 - sorted(values).index(high)
    assert below == above
    assert 2 * _few_heads(below, count) <= 0.05 < 2 * _few_heads(below + 1, count)


def test_few_rounds_claim_nothing_about_a_median() -> None:
    assert median_interval([1.1, 1.2, 1.1, 1.15, 1.12]) is None


@pytest.mark.slow
def test_intervals_hold_about_as_often_as_they_say() -> None:
    draw = random.Random(0)
    hits = {"mean": 0, "median": 0, "resampled": 0}
    for _ in range(400):
        values = [draw.gauss(0.02, 0.1) for _ in range(40)]
        for name, bounds in (
            ("mean", mean_interval(values)),
            ("median", median_interval(values)),
            ("resampled", resampled_interval(values, lambda part: sum(part) / len(part))),
        ):
            assert bounds is not None
            hits[name] += bounds[0] <= 0.02 <= bounds[1]
    assert 0.92 < hits["mean"] / 400 < 0.98
    assert 0.92 < hits["median"] / 400 < 0.99
    assert 0.90 < hits["resampled"] / 400 < 0.98


def test_resampling_finds_the_spread_of_a_ratio() -> None:
    """Against the delta method."""
    draw = random.Random(1)
    pairs = [(draw.uniform(1, 2), draw.uniform(2, 4)) for _ in range(400)]
    low, high = resampled_interval(pairs, lambda part: sum(b for _, b in part) / sum(a for a, _ in part)) or (0, 0)
    a, b = (sum(p[i] for p in pairs) / 400 for i in (0, 1))
    variance = sum(((y - b / a * x) / a) ** 2 for x, y in pairs) / 400 / 400
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(variance), rel=0.1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("gained", "lost", "count"), [(0, 5, 200), (7, 17, 400), (0, 0, 200), (3, 0, 3), (30, 10, 100)]
)
def test_the_interval_of_paired_shares_inverts_the_score_test(gained: int, lost: int, count: int) -> None:
    """At its ends the score of the likelihood, whose other parameter is found by search, is 1.96 standard deviations."""
    interval = paired_interval(gained, lost, count)
    assert interval is not None
    for end in interval:
        if end in (0.0, -1.0, 1.0):  # extended to no difference, or as far as there is
            continue

        def likelihood(losses: float, end: float = end) -> float:
            shares = (losses + end, losses, 1 - 2 * losses - end)
            counts = (gained, lost, count - gained - lost)
            if min(shares) < -1e-12:
                return -math.inf
            return sum(n * math.log(max(share, 1e-300)) for n, share in zip(counts, shares, strict=True) if n)

        grid = [max(0.0, -end) + i / 200_000 * (1 - abs(end)) / 2 for i in range(200_001)]
        losses = max(grid, key=likelihood)
        variance = count * (2 * losses + end * (1 - end))
        assert (gained - lost - count * end) ** 2 / variance == pytest.approx(1.96**2, rel=0.01)


def test_the_interval_of_paired_shares_and_the_exact_test_agree() -> None:
    for gained in range(16):
        for lost in range(16):
            interval = paired_interval(gained, lost, 60)
            assert interval is not None
            assert excludes(interval, 0.0) == (sign_test(gained, lost) < 0.05)


@pytest.mark.parametrize(("count", "gains", "losses"), [(200, 0.0, 0.005), (1000, 0.0, 0.002), (200, 0.005, 0.01)])
def test_the_interval_of_paired_shares_holds_for_few_flips(count: int, gains: float, losses: float) -> None:
    """Where Student's t, which takes the few that were seen for all there are, holds far less often."""
    draw = random.Random(1)
    held = 0
    for _ in range(1000):
        items = [draw.random() for _ in range(count)]
        gained, lost = sum(x < gains for x in items), sum(gains <= x < gains + losses for x in items)
        low, high = paired_interval(gained, lost, count) or (1.0, -1.0)
        held += low <= gains - losses <= high
    assert held / 1000 > 0.93


def test_as_many_items_are_resampled_alike() -> None:
    drawn: list[list[Sequence[int]]] = [[], []]
    for found, items in zip(drawn, (range(10), range(100, 110)), strict=True):
        bounds = resampled_interval(items, lambda part, found=found: found.append(part) or float(sum(part)))
        assert bounds is not None
    assert drawn[0] == [[item - 100 for item in part] for part in drawn[1]]
    assert len({tuple(part) for part in drawn[0]}) > 900, "resamples that differ from each other"


def test_what_would_take_minutes_is_not_resampled() -> None:
    calls = []
    assert resampled_interval(["a text", "another"], lambda part: calls.append(part) or time.sleep(0.08) or 1.0) is None
    assert len(calls) == 3


def test_too_little_has_no_interval_and_no_significance() -> None:
    assert mean_interval([0.5]) is None
    assert share_interval(0, 0) is None
    assert resampled_interval([1.0], sum) is None
    assert resampled_interval([1.0, 2000.0], lambda part: math.exp(max(part))) is None
    assert excludes(None, 1.0) is None
    assert excludes((0.9, 1.1), 1.0) is False
    assert excludes((1.01, 1.1), 1.0) is True
