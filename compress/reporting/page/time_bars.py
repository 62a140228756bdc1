"""Time of each part of a step, as stacked bars and a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ...results.result import TimePart
from ..tables.table import Cell, Row, Table, table

_HUES = 8
_ROOM_FOR_KEY = 4.5  # percent of the width below which a segment's number would not fit


@dataclass(frozen=True)
class SegmentKey:
    """The meaning of a segment's colour and number."""

    number: int
    name: str

    @property
    def hue(self) -> int:
        """One of the style sheet's."""
        return (self.number - 1) % _HUES


@dataclass(frozen=True)
class Segment:
    """A part of a bar: where it begins and how wide it is, in percent of the longest bar."""

    key: SegmentKey
    seconds: str
    start: float
    width: float

    @property
    def middle(self) -> float | None:
        """Where its number is written; None where there is no room."""
        return self.start + self.width / 2 if self.width >= _ROOM_FOR_KEY else None


@dataclass(frozen=True)
class TimeBar:
    """A model's bar."""

    model: int
    name: str
    together: str
    segments: list[Segment]


@dataclass(frozen=True)
class TimeBars:
    """Bars of one kind of step, and their numbers."""

    title: str
    keys: list[SegmentKey]
    bars: list[TimeBar]
    numbers: Table | None


def time_bars(report: ReportData) -> list[TimeBars]:
    """Bars for decoding a token and for a prompt; all bars of one kind have the same scale."""
    keys: dict[str, SegmentKey] = {}
    for model in report.models:
        if model.speed is not None:
            for part in (*model.speed.decode_time, *model.speed.prefill_time):
                keys.setdefault(part.name, SegmentKey(len(keys) + 1, part.name))
    decode = {i: _drawable(m.speed.decode_time) for i, m in enumerate(report.models) if m.speed}
    prefill = {i: _drawable(m.speed.prefill_time) for i, m in enumerate(report.models) if m.speed}
    found = [
        _bars(report, "Decoding one token", decode, keys),
        _bars(report, "Reading one prompt", prefill, keys),
    ]
    return [bars for bars in found if bars is not None]


def _drawable(parts: list[TimePart]) -> list[TimePart]:
    return [part for part in parts if 0 <= part.seconds < math.inf]


def _bars(
    report: ReportData, title: str, times: dict[int, list[TimePart]], keys: dict[str, SegmentKey]
) -> TimeBars | None:
    times = {i: parts for i, parts in times.items() if parts}
    longest = max((sum(p.seconds for p in parts) for parts in times.values()), default=0)
    if longest <= 0:
        return None
    used = [key for name, key in keys.items() if any(p.name == name for parts in times.values() for p in parts)]
    bars = [
        TimeBar(
            i,
            report.models[i].name,
            wording.seconds(sum(p.seconds for p in parts)),
            _segments(parts, keys, longest),
        )
        for i, parts in times.items()
    ]
    return TimeBars(title, used, bars, _numbers(report, title, times, used))


def _segments(parts: list[TimePart], keys: dict[str, SegmentKey], longest: float) -> list[Segment]:
    out = []
    at = 0.0
    for part in sorted(parts, key=lambda p: keys[p.name].number):
        width = 100 * part.seconds / longest
        out.append(Segment(keys[part.name], wording.seconds(part.seconds), at, width))
        at += width
    return out


def _numbers(report: ReportData, title: str, times: dict[int, list[TimePart]], used: list[SegmentKey]) -> Table | None:
    rows: list[Row] = []
    for i, parts in times.items():
        by_name = {p.name: p.seconds for p in parts}
        total = sum(by_name.values())
        cells: list[Cell | None] = [Cell(report.models[i].name, kind="name"), Cell(wording.seconds(total), total)]
        for key in used:
            seconds = by_name.get(key.name)
            cells.append(None if seconds is None else Cell(wording.seconds(seconds), seconds))
        rows.append((i, cells))
    return table(f"{title}, in numbers", ["model", "together", *(key.name for key in used)], rows)
