"""How long steps take by their number of rows, as measured."""

from __future__ import annotations

from bisect import bisect_left

# How much a measured time counts against earlier ones.
_WEIGHT = 0.2
# How far a step that took longer than known moves the times of other numbers of rows.
_SHARED = 0.1
# Longer ones were interrupted.
_OUTLIER = 4.0


class TimesByRows:
    """Seconds by rows: between measured numbers of rows on a line, beyond them on the line through the last two.

    Longer contexts make all steps longer, so that a measured step moves the times of other numbers of rows a little, too.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []

    @property
    def is_known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self._rows)

    def measured(self, rows: int, seconds: float) -> float:
        """Learn from a step. Returns by which factor it moved the times of other numbers of rows."""
        at = bisect_left(self._rows, rows)
        if at == len(self._rows) or self._rows[at] != rows:
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)
            return 1.0
        ratio = min(seconds / self._seconds[at], _OUTLIER) - 1
        own = self._seconds[at] * (1 + _WEIGHT * ratio)
        self.scale(1 + _SHARED * ratio)
        self._seconds[at] = own
        return 1 + _SHARED * ratio

    def scale(self, factor: float) -> None:
        """All steps take longer by a factor."""
        self._seconds = [each * factor for each in self._seconds]

    def shift(self, seconds: float) -> None:
        """All steps take longer by so much."""
        self._seconds = [each + seconds for each in self._seconds]

    def of(self, rows: int) -> float:
        """Seconds of a step; more rows take no less."""
        known, seconds = self._rows, self._seconds
        if len(known) == 1:
            return seconds[0]
        above = min(max(bisect_left(known, rows), 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        slope = max(0.0, (seconds[above] - seconds[above - 1]) / (high - low))
        return max(seconds[above - 1] + slope * (rows - low), min(seconds))
