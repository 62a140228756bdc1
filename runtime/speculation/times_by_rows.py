"""How long steps take by their number of rows, as measured."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

# How much a measured time counts against earlier ones, of which the first few are worth as much each.
_WEIGHT = 0.2
# How far it moves the times of other numbers of rows, of how far it moves its own.
_SHARED = 0.5
# Longer ones were interrupted.
_OUTLIER = 4.0
# How much longer a step may seem to take than one of more rows: by chance the least of many measured times is too little.
_LONGER = 1.15


class TimesByRows:
    """Seconds by rows: between measured numbers of rows on a line, beyond them on the line through the last one and one of half as many.

    Longer contexts make all steps longer, so that a measured step moves the times of other numbers of rows a little, too. A time that was
    interrupted must not make all others look longer: no step takes much longer than one of more rows, or longer than the same rows in several steps.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._counts: list[int] = []  # how often each was measured
        self._found: dict[
            int, float
        ] = {}  # answers since the last measurement: decisions ask for the same rows again and again

    @property
    def is_known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self._rows)

    def measured(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
        self._found.clear()
        at = bisect_left(self._rows, rows)
        if at == len(self._rows) or self._rows[at] != rows:
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)
            self._counts.insert(at, 1)
            return
        ratio = min(seconds / self._seconds[at], _OUTLIER) - 1
        self._counts[at] += 1
        change = max(_WEIGHT, 1 / self._counts[at]) * ratio
        own = self._seconds[at] * (1 + change)
        self._seconds = [each * (1 + _SHARED * change) for each in self._seconds]
        self._seconds[at] = own

    def shift(self, seconds: float) -> None:
        """All steps take longer by so much."""
        self._found.clear()
        self._seconds = [each + seconds for each in self._seconds]

    def of(self, rows: int) -> float:
        """Seconds of a step; more rows take no less."""
        found = self._found.get(rows)
        if found is None:
            found = self._found[rows] = self._between(rows)
        return found

    def _between(self, rows: int) -> float:
        known, seconds = self._rows, self._seconds
        if len(known) == 1:
            return seconds[0]
        if rows > known[-1]:  # two numbers that are close to each other say little of larger ones
            before = max(0, bisect_right(known, known[-1] / 2) - 1)
            slope = max(0.0, (seconds[-1] - seconds[before]) / (known[-1] - known[before]))
            return max(min(seconds), min(seconds[-1] + slope * (rows - known[-1]), seconds[-1] * rows / known[-1]))
        above = max(bisect_left(known, rows), 1)
        low, high = known[above - 1], known[above]
        slope = max(0.0, (seconds[above] - seconds[above - 1]) / (high - low))
        found = max(seconds[above - 1] + slope * (rows - low), min(seconds))
        return min(found, _LONGER * min(seconds[bisect_left(known, rows) :]))
