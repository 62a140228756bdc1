"""Axes: from values to positions, with ticks at round numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

_WIDE = 6  # a range of this factor or more is drawn in logarithms
_FURTHEST = 1e12  # and what is beyond this one, at its end


@dataclass(frozen=True)
class Tick:
    """A round value, and where it is drawn."""

    text: str
    at: float


@dataclass(frozen=True)
class PlotAxis:
    """One axis of a plot.

    Attributes:
        low, high: the values at its ends.
        start, end: where those are drawn; they may fall.
        log: whether it is drawn in logarithms.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def around(cls, values: list[float], start: float, end: float) -> PlotAxis:
        """An axis with some air around these values."""
        low, high = min(values), min(max(values), _FURTHEST)
        if low > 0:
            low = max(low, high / _FURTHEST)
        log = low > 0 and high / low >= _WIDE
        if log:
            air = (high / low) ** 0.08
            return cls(low / air, high * air, start, end, log)
        air = 0.1 * (high - low) or 0.1 * abs(high) or 1
        return cls(max(0, low - air) if low >= 0 else low - air, high + air, start, end, log)

    def at(self, value: float) -> float:
        """Where a value is drawn; what lies outside is drawn at the end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """About ``count`` round values."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
                found = [d * 10.0**p for p in powers for d in digits if self.low <= d * 10.0**p <= self.high]
                if len(found) >= 4:
                    return found
        step = nice_step((self.high - self.low) / count)
        first = math.ceil(self.low / step)
        return [round(i * step, 12) for i in range(first, math.floor(self.high / step) + 1)]

    def marks(self, count: int = 6) -> list[Tick]:
        """The ticks as they are written."""
        return [Tick(_text(value), self.at(value)) for value in self.ticks(count)]


def nice_step(at_least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(d * power for d in (1, 2, 2.5, 5, 10) if d * power >= at_least * 0.999)


def _text(value: float) -> str:
    """A round value without needless zeros."""
    return f"{value:,.6f}".rstrip("0").rstrip(".") if abs(value) < 1e9 else f"{value:g}"
