"""Learning rates over a run, as a share of the peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

# The share of the peak at the end.
_FLOOR = 0.1
# The share of a warm-up, stable, decay run that decays.
_DECAY = 0.2


def cosine(done: float) -> float:
    """Cosine decay to a tenth."""
    return _FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2


def linear(done: float) -> float:
    """Linear decay to a tenth."""
    return 1 - (1 - _FLOOR) * done


def wsd(done: float) -> float:
    """The peak, then linear decay to a hundredth over the last fifth (MiniCPM, arXiv:2404.06395)."""
    return 1.0 if done < 1 - _DECAY else max(0.01, (1 - done) / _DECAY)


def constant(_done: float) -> float:
    """The peak throughout."""
    return 1.0


SCHEDULES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"cosine": cosine, "wsd": wsd, "linear": linear, "constant": constant}
)


def rate_at(schedule: str, step: int, steps: int, warmup: int) -> float:
    """The share of the peak rate at a step, counted from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return SCHEDULES[schedule]((step - warmup) / max(1, steps - warmup))
