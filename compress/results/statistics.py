"""Uncertainty of numbers: 95% intervals of means, shares and paired differences.

scipy is imported where it is used: it takes most of a second, and not every command needs an interval.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Interval = tuple[float, float]

_CONFIDENCE = 0.95
_TAIL = (1 - _CONFIDENCE) / 2
_RESAMPLES = 1000
_AT_ONCE = 100  # resamples whose places are drawn and kept together
_MOST_SECONDS = 60


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Of the mean of independent values, by Student's t; None for fewer than two."""
    from scipy import stats

    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = float(stats.t.ppf(1 - _TAIL, count - 1)) * spread / math.sqrt(count)
    return mean - half, mean + half


def median_interval(values: Sequence[float]) -> Interval | None:
    """Of the median of independent values, whatever their distribution, by their ranks; None for fewer than six.

    The k-th smallest and largest enclose the median unless fewer than k values fall on one side of it, which has the
    probability of so few heads in that many coin tosses.
    """
    from scipy import stats

    ordered = sorted(values)
    k = int(stats.binom.ppf(_TAIL, len(ordered), 0.5))
    return (ordered[k - 1], ordered[-k]) if k else None


def share_interval(hits: float, count: int) -> Interval | None:
    """Of a share of successes, by Wilson's score; None for no trial."""
    from scipy import stats

    if count == 0:
        return None
    found = stats.binomtest(int(hits), count).proportion_ci(_CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def paired_interval(gained: int, lost: int, count: int) -> Interval | None:
    """Of the difference of two shares of the same items, by Tango's score (Statistics in Medicine 17, 1998); None for no item.

    Unlike Student's t it holds for few flips, and for none. Where :func:`sign_test`, which is exact, finds no difference, it includes none.
    """
    from scipy import optimize, stats

    if count == 0:
        return None
    wanted = float(stats.norm.ppf(1 - _TAIL))

    def score(difference: float) -> float:
        """How far what was seen is from a true difference, in standard deviations under it."""
        linear = (2 * count - gained + lost) * difference - gained - lost
        root = math.sqrt(max(0.0, linear**2 + 8 * count * lost * difference * (1 - difference)))
        losses = (root - linear) / (4 * count)  # the likeliest share of lost items, if that were the difference
        variance = count * (2 * losses + difference * (1 - difference))
        return (gained - lost - count * difference) / math.sqrt(max(variance, 1e-300))

    seen, edge = (gained - lost) / count, 1 - 1e-12

    def where(value: float, low: float, high: float) -> float:
        return optimize.root_scalar(lambda difference: score(difference) - value, bracket=(low, high)).root

    low = -1.0 if score(-edge) < wanted else where(wanted, -edge, min(seen, edge))
    high = 1.0 if score(edge) > -wanted else where(-wanted, max(seen, -edge), edge)
    if sign_test(gained, lost) >= 1 - _CONFIDENCE:
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high


def sign_test(gained: int, lost: int) -> float:
    """The probability of a split of flipped answers this uneven by chance (McNemar's exact test)."""
    from scipy import stats

    flipped = gained + lost
    return float(stats.binomtest(gained, flipped).pvalue) if flipped else 1.0


def resampled_interval(items: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> Interval | None:
    """Of any statistic of independent items, by the percentile bootstrap.

    None for fewer than two items, and where the statistic overflows or would take minutes.

    The resamples are the same at every call with the same number of items.
    """
    import numpy as np
    from scipy import stats

    count = len(items)
    if count < 2:
        return None
    calls, begun = itertools.count(1), time.monotonic()

    def of_places(places: np.ndarray) -> float:
        value = statistic([items[i] for i in places.tolist()])
        # BLEU and the like take seconds for one value.
        if next(calls) == 3 and (time.monotonic() - begun) / 3 * _RESAMPLES > _MOST_SECONDS:
            raise _NoIntervalError
        if not math.isfinite(value):
            raise _NoIntervalError
        return value

    # Places are drawn and not items, which may be texts or pairs of anything.
    try:
        found = stats.bootstrap(
            (np.arange(count),),
            of_places,
            n_resamples=_RESAMPLES,
            batch=_AT_ONCE,
            vectorized=False,
            confidence_level=_CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(count),
        )
    except (_NoIntervalError, ArithmeticError, ValueError):  # an exponential of what is too large
        return None
    low, high = found.confidence_interval
    return float(low), float(high)


def excludes(interval: Interval | None, nothing: float) -> bool | None:
    """Whether an interval excludes ``nothing``, the value of no change; None if there is no interval."""
    return None if interval is None else not interval[0] <= nothing <= interval[1]


def exp(value: float) -> float:
    """The exponential, kept within what a float holds: a broken model's perplexity is huge, not an error."""
    return math.exp(min(value, 700.0))


class _NoIntervalError(Exception):
    """A statistic that is too slow, or not a number for some resample."""
