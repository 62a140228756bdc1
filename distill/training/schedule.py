"""Learning rates over a run, as a share of the peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

# What is left of the peak at the end.
_FLOOR = 0.1
# The share of a warm-up, stable, decay run that decays.
_DECAY = 0.2


def cosine(done: float) -> float:
    """Half a cosine down to a tenth."""
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2


def linear(done: float) -> float:
    """A straight line down to a tenth."""
    return 1 - (1 - _FLOOR) * done


def wsd(done: float) -> float:
    """The peak, and in the last fifth a straight line down to a hundredth (MiniCPM, arXiv:2404.06395)."""
    return 1.0 if done < 1 - _DECAY else max(0.01, (1 - done) / _DECAY)


def constant(_done: float) -> float:
    """The peak all the time."""
    return 1.0


SCHEDULES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"cosine": cosine, "wsd": wsd, "linear": linear, "constant": constant}
)


def rate_at(schedule: str, step: int, steps: int, warmup: int) -> float:
    """The share of the peak rate that a step is given, steps being counted from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return SCHEDULES[schedule]((step - warmup) / max(1, steps - warmup))
