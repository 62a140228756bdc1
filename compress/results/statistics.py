"""How sure a number is: 95% intervals of means, shares and differences of the same items."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

Interval = tuple[float, float]

_Z = 1.959963984540054
_RESAMPLES = 1000
_MOST_SECONDS = 60


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Of the mean of independent values, by Student's t; None for fewer than two."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = _t95(count - 1) * spread / math.sqrt(count)
    return mean - half, mean + half


def median_interval(values: Sequence[float]) -> Interval | None:
    """Of the median of independent values, whatever their distribution, by their ranks; None for fewer than six.

    The k-th smallest and largest hold the median unless fewer than k values fall on one side of it, which is as likely as
    so few heads among as many coins.
    """
    count = len(values)
    ordered = sorted(values)
    tail, chosen = 0.0, None
    for k in range(count // 2):
        tail += math.comb(count, k) / 2**count
        if 2 * tail > 0.05:
            break
        chosen = ordered[k], ordered[count - 1 - k]
    return chosen


def share_interval(hits: float, count: int) -> Interval | None:
    """Of a share of successes, by Wilson's score; None for no trial."""
    if count == 0:
        return None
    share, z = hits / count, _Z
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def sign_test(gained: int, lost: int) -> float:
    """How likely so uneven a split of flipped answers is by chance (McNemar's exact test)."""
    flipped = gained + lost
    if flipped == 0:
        return 1.0
    tail = sum(math.comb(flipped, k) for k in range(min(gained, lost) + 1)) / 2**flipped
    return min(1.0, 2 * tail)


def resampled_interval(items: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> Interval | None:
    """Of any statistic of independent items, by the bootstrap's percentiles.

    None for fewer than two items, and where the statistic overflows or would take minutes.

    The resamples are the same at every call with as many items.
    """
    count = len(items)
    if count < 2:
        return None
    draw = random.Random(count)
    found = []
    begun = time.monotonic()
    try:
        for i in range(_RESAMPLES):
            found.append(statistic([items[draw.randrange(count)] for _ in range(count)]))
            # BLEU and the like take seconds for one value.
            if i == 2 and (time.monotonic() - begun) / 3 * _RESAMPLES > _MOST_SECONDS:
                return None
    except (ArithmeticError, ValueError):  # an exponential of what is too large
        return None
    if not all(map(math.isfinite, found)):
        return None
    found.sort()
    return found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES) - 1]


def excludes(interval: Interval | None, nothing: float) -> bool | None:
    """Whether an interval leaves no room for ``nothing`` having changed; None if there is no interval."""
    return None if interval is None else not interval[0] <= nothing <= interval[1]


def _t95(freedom: int) -> float:
    """The 97.5% quantile of Student's t: exact for one and two degrees, else an expansion around the normal's.

    The expansion (Hill's, to the fourth order) is off by less than 0.5% from three degrees on.
    """
    if freedom == 1:
        return 12.706204736432095
    if freedom == 2:
        return 4.302652729911275
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
