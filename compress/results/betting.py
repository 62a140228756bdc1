"""Bounds on the mean of bounded values that hold however often, and whenever, one looks.

A gambler who may not lose on average if a claim is true ("the mean is at least x") bets against it, value by value. His wealth
is above 1/a at any time with a probability of at most a (Ville's inequality), so that then the claim is rejected with confidence 1 - a.
Waudby-Smith and Ramdas 2023, Estimating means of bounded random variables by betting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# Shares of his wealth that are staked, each by a part of him: small ones win if values vary much, large ones if they hardly do.
_STAKES = tuple(0.98 * 0.5**i for i in range(12))
_HALVINGS = 60
_MOST_MORE = 1e6


def log_wealth(values: Sequence[float], limit: float, low: float, high: float) -> list[float]:
    """The logarithm of the wealth after each value, of one who bets that the mean is below a limit.

    Args:
        values: independent and alike, in order.
        limit: the claim is that their mean is at least so much.
        low, high: between which all of them are.
    """
    import numpy as np

    gains = np.cumsum(_log_factors(np.asarray(values, dtype=float), limit, low, high), axis=0)
    return _mixed(gains).tolist()


def upper_bound(values: Sequence[float], low: float, high: float, alpha: float) -> float:
    """A bound that the mean exceeds with a probability of at most ``alpha``, however many values there are when one looks.

    Args:
        values: independent and alike.
        low, high: between which all of them are.
        alpha: the probability.
    """
    import numpy as np

    found, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    below, above = low, high
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        if _log_of(found, counts, middle, low, high) >= -math.log(alpha):
            above = middle
        else:
            below = middle
    return above


def lower_bound(values: Sequence[float], low: float, high: float, alpha: float) -> float:
    """A bound that the mean is below with a probability of at most ``alpha``; arguments as of :func:`upper_bound`."""
    return -upper_bound([-value for value in values], -high, -low, alpha)


def more_values(values: Sequence[float], limit: float, low: float, high: float, alpha: float) -> int | None:
    """How many more values, if they are like these, would show that the mean is below a limit; None if no number would.

    Args:
        values: independent and alike.
        limit: of the mean.
        low, high: between which all of them are.
        alpha: the probability of an error.
    """
    import numpy as np

    found, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)

    def shows(times: float) -> bool:
        return _log_of(found, counts * times, limit, low, high) >= -math.log(alpha)

    if not len(values) or not shows(_MOST_MORE):
        return None
    few, many = 0.0, _MOST_MORE
    while many - few > 1e-3 * many:
        middle = math.sqrt(max(few, 1e-3) * many)
        few, many = (few, middle) if shows(middle) else (middle, many)
    return max(0, math.ceil(len(values) * (many - 1)))


def _log_of(found: np.ndarray, counts: np.ndarray, limit: float, low: float, high: float) -> float:
    return float(_mixed((_log_factors(found, limit, low, high) * counts[:, None]).sum(0, keepdims=True))[0])


def _log_factors(values: np.ndarray, limit: float, low: float, high: float) -> np.ndarray:
    """By value and stake: what a bet multiplies a part of the wealth by, at most on average by one if the claim is true."""
    import numpy as np

    assert low <= values.min(initial=high)
    assert values.max(initial=low) <= high
    room = max(high - limit, 1e-12)
    return np.log1p(np.asarray(_STAKES) * ((limit - values) / room)[:, None])


def _mixed(gains: np.ndarray) -> np.ndarray:
    """The logarithm of all parts' wealth together, which began alike."""
    import numpy as np

    return np.logaddexp.reduce(gains, axis=1) - math.log(len(_STAKES))
