"""Bounds by betting: how often they are wrong is simulated, and their size is compared with exact bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from smelt.compress.results.betting import log_wealth, lower_bound, more_values, upper_bound

ALPHA = 0.05


def flips(draw: np.random.Generator, lost: float, gained: float, count: int) -> np.ndarray:
    """Items that a model answers worse (1), better (-1) or as its baseline (0)."""
    return draw.choice([1.0, -1.0, 0.0], size=count, p=[lost, gained, 1 - lost - gained])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("lost", "gained"), [(0.01, 0.0), (0.05, 0.04), (0.2, 0.19), (0.5, 0.3)], ids=lambda value: f"{value:g}"
)
def test_looking_after_every_item_certifies_too_little_in_fewer_than_one_in_twenty(lost: float, gained: float) -> None:
    """The true loss is the limit itself; a bound for a fixed number of items would fail far more often."""
    draw, wrong, draws = np.random.default_rng(1), 0, 3000
    for _ in range(draws):
        wealth = log_wealth(flips(draw, lost, gained, 500).tolist(), lost - gained, -1.0, 1.0)
        wrong += max(wealth) >= -math.log(ALPHA)
    assert wrong / draws < ALPHA


def test_values_of_any_distribution_are_bounded_too() -> None:
    draw, wrong, draws = np.random.default_rng(2), 0, 2000
    for _ in range(draws):
        values = draw.beta(0.3, 5.0, 300) * 2 - 1
        wrong += max(log_wealth(values.tolist(), 2 * 0.3 / 5.3 - 1, -1.0, 1.0)) >= -math.log(ALPHA)
    assert wrong / draws < ALPHA


def test_bounds_are_where_the_wealth_is_large_enough() -> None:
    values = flips(np.random.default_rng(3), 0.06, 0.02, 800).tolist()
    upper, lower = upper_bound(values, -1.0, 1.0, ALPHA), lower_bound(values, -1.0, 1.0, ALPHA)
    assert lower < np.mean(values) < upper
    assert log_wealth(values, upper, -1.0, 1.0)[-1] == pytest.approx(-math.log(ALPHA), abs=1e-6)
    mirrored = [-value for value in values]
    assert log_wealth(mirrored, -lower, -1.0, 1.0)[-1] == pytest.approx(-math.log(ALPHA), abs=1e-6)


@pytest.mark.parametrize(("lost", "count"), [(0, 300), (0, 5000), (12, 1000), (300, 1000)])
def test_the_price_of_looking_at_any_time(lost: int, count: int) -> None:
    """Beside Clopper and Pearson's exact bound, which holds for one look: above it, and not by much."""
    values = [1.0] * lost + [0.0] * (count - lost)
    exact = stats.binomtest(lost, count).proportion_ci(1 - 2 * ALPHA, method="exact").high
    found = upper_bound(values, 0.0, 1.0, ALPHA)
    assert exact < found < 2.2 * exact


def test_nothing_lost_is_a_formula() -> None:
    """Each part of the wealth grows by the same factor."""
    found = upper_bound([0.0] * 1000, -1.0, 1.0, ALPHA)
    stakes = [0.98 / 2**i for i in range(12)]
    wealth = np.mean([(1 + stake * found / (1 - found)) ** 1000 for stake in stakes])
    assert wealth == pytest.approx(1 / ALPHA)


def test_as_many_more_values_as_are_said_show_it() -> None:
    values = flips(np.random.default_rng(4), 0.02, 0.015, 2000).tolist()
    limit = float(np.mean(values)) + 0.01
    more = more_values(values, limit, -1.0, 1.0, ALPHA)
    assert more is not None
    assert more > 0
    times = (len(values) + more) / len(values)
    like_these = [value for value in (1.0, -1.0, 0.0) for _ in range(round(values.count(value) * times))]
    assert upper_bound(like_these, -1.0, 1.0, ALPHA) == pytest.approx(limit, abs=2e-4)
    assert more_values(values, float(np.mean(values)) - 0.001, -1.0, 1.0, ALPHA) is None
    assert more_values(like_these, limit + 0.01, -1.0, 1.0, ALPHA) == 0
    assert more_values([], 0.1, -1.0, 1.0, ALPHA) is None
