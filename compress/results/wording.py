"""How numbers are formatted: the same on the page, in Markdown and on the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...system.hardware.machine import human_bytes
from .result import Change, Interval, Spread, TaskChange

WITHIN_NOISE = "within noise"
_SAME = 1.005  # a ratio nearer to 1 than this would be printed as 1.00


def number(value: float) -> str:
    """About three significant digits, whole numbers with separators: ``41.2``, ``1,234``, ``3.1e-05``."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e9:
        text = f"{size:.3g}"
    elif size >= 99.95:
        text = f"{size:,.0f}"
    elif size >= 9.995:
        text = f"{size:.1f}"
    elif size >= 0.9995:
        text = f"{size:.2f}"
    else:
        text = f"{size:.3g}" if size < 1e-4 else f"{size:.{2 - math.floor(math.log10(size))}f}"
    return text if value > 0 else f"−{text}"


def fixed(value: float, decimals: int) -> str:
    """With a fixed number of decimals."""
    return f"{value:,.{decimals}f}" if math.isfinite(value) else number(value)


def exact(value: float) -> str:
    """With the digits that a table of every number keeps."""
    if not math.isfinite(value):
        return number(value)
    text = f"{abs(value):,.0f}" if float(value).is_integer() else f"{abs(value):,.6g}"
    return f"−{text}" if value < 0 else text


def perplexity(value: float) -> str:
    """Two decimals, as papers give it."""
    return fixed(value, 2) if value < 1000 else number(value)


def signed(value: float) -> str:
    """A difference with its sign: ``+0.012``."""
    text = f"{abs(value):.3f}" if abs(value) < 10 else number(abs(value))
    if not float(text.replace(",", "") if math.isfinite(value) else "1"):
        return "0.000"
    return f"{'+' if value > 0 else '−'}{text}"


def times(ratio: float) -> str:
    """A factor: ``2.9×``, ``1.04×``, ``12×``."""
    if not math.isfinite(ratio) or ratio >= 99.5:
        return f"{number(ratio)}×"
    if ratio >= 9.95:
        return f"{ratio:.0f}×"
    return f"{ratio:.1f}×" if ratio >= 1.095 else f"{ratio:.2f}×"


def factor(ratio: float) -> str:
    """A factor with two decimals, for the ends of an interval: ``2.81×``."""
    return f"{fixed(ratio, 2)}×" if ratio < 99.5 else times(ratio)


def speedup(ratio: float) -> str:
    """A rate over the baseline's: ``2.9× faster`` or ``1.3× slower``."""
    return _beside(ratio, "faster", "slower", "same speed")


def shrinkage(ratio: float) -> str:
    """Bytes over the baseline's: ``3.4× smaller`` or ``1.1× larger``."""
    return _beside(ratio, "larger", "smaller", "same size")


def percent_change(ratio: float) -> str:
    """``+1.8%``; factors of ten and more stay factors."""
    if not math.isfinite(ratio) or ratio >= 10:
        return times(ratio)
    percent = 100 * (ratio - 1)
    text = f"{abs(percent):.{2 if abs(percent) < 0.995 else 1 if abs(percent) < 99.5 else 0}f}"
    if not float(text):
        return "0.00%"
    return f"{'+' if percent > 0 else '−'}{text}%"


def share(value: float) -> str:
    """A part of 1 as ``97.3%``."""
    return f"{100 * value:.1f}%" if math.isfinite(value) else number(value)


def bytes_(count: float) -> str:
    """``1.5 kB``, in powers of 1000."""
    return human_bytes(count) if math.isfinite(count) else f"{number(count)} B"


def rate(value: float) -> str:
    """``41.2 tokens/s``."""
    return f"{number(value)} tokens/s"


def seconds(value: float) -> str:
    """In the unit that leaves few zeros: ``34.1 ms``, ``2.40 s``, ``12 min 20 s``."""
    if 599.5 <= value < math.inf:
        return f"{round(value) // 60} min {round(value) % 60} s"
    if value >= 0.9995 or value == 0:
        return f"{number(value)} s"
    if value >= 0.9995e-3:
        return f"{number(value * 1e3)} ms"
    return f"{number(value * 1e6)} µs"


def interval(bounds: Interval | None, say: Callable[[float], str]) -> str:
    """``2.7× to 3.1×``; nothing without bounds."""
    if bounds is None:
        return ""
    low, high = say(bounds[0]), say(bounds[1])
    # A unit is written once: "33.1 to 35.0 ms".
    tail = high.partition(" ")[1] + high.partition(" ")[2]
    return f"{low.removesuffix(tail) if tail else low} to {high}"


def spread(quantity: Spread, say: Callable[[float], str]) -> str:
    """The range of repeated measurements; nothing for a single one."""
    return interval(quantity.range, say) if len(quantity.values) > 1 else ""


def noise(change: Change | TaskChange) -> str:
    """``within noise`` where an interval says so; nothing is claimed without one."""
    return WITHIN_NOISE if change.significant is False else ""


def p_value(value: float) -> str:
    """``p = 0.031``."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}" if math.isfinite(value) else f"p = {number(value)}"


def _beside(ratio: float, more: str, less: str, same: str) -> str:
    if not math.isfinite(ratio) or ratio <= 0:
        return f"{number(ratio)}×"
    factor = max(ratio, 1 / ratio)
    return same if factor < _SAME else f"{times(factor)} {more if ratio > 1 else less}"
