"""Where the time of a step goes, as stacked bars beside their numbers."""

from __future__ import annotations

import math

from ..results.result import TimePart
from . import wording
from .markup import Cell, Row, esc, name, table
from .report import ReportData

_HUES = 8
_ROOM_FOR_KEY = 4.5  # percent of the width below which a segment's number would not fit


def time_bars(report: ReportData) -> str:
    """Bars for decoding a token and for a prompt; all bars of one kind have the same scale."""
    keys: dict[str, int] = {}
    for model in report.models:
        if model.speed is not None:
            for part in (*model.speed.decode_time, *model.speed.prefill_time):
                keys.setdefault(part.name, len(keys) + 1)
    decode = {i: _drawable(m.speed.decode_time) for i, m in enumerate(report.models) if m.speed}
    prefill = {i: _drawable(m.speed.prefill_time) for i, m in enumerate(report.models) if m.speed}
    return _bars(report, "Decoding one token", decode, keys) + _bars(report, "Reading one prompt", prefill, keys)


def _drawable(parts: list[TimePart]) -> list[TimePart]:
    return [part for part in parts if 0 <= part.seconds < math.inf]


def _bars(report: ReportData, title: str, times: dict[int, list[TimePart]], keys: dict[str, int]) -> str:
    times = {i: parts for i, parts in times.items() if parts}
    longest = max((sum(p.seconds for p in parts) for parts in times.values()), default=0)
    if longest <= 0:
        return ""
    used = [key for key in keys if any(p.name == key for parts in times.values() for p in parts)]
    legend = "".join(f"<li>{_swatch(keys[key])}{esc(key)}</li>" for key in used)
    rows = []
    for i, parts in times.items():
        total = sum(p.seconds for p in parts)
        said = f"{report.models[i].name}: {wording.seconds(total)}"
        rows.append(
            f'<div class="bar-row" data-model="{i}"><span>{name(report.models[i].name)}</span>'
            f'<svg class="stack" role="img" aria-label="{esc(said)}">{_segments(parts, keys, longest)}</svg>'
            f"<span>{wording.seconds(total)}</span></div>"
        )
    return (
        f'<figure class="bars"><figcaption>{esc(title)}</figcaption><ol class="legend">{legend}</ol>'
        f"{''.join(rows)}</figure>{_numbers(report, title, times, used)}"
    )


def _segments(parts: list[TimePart], keys: dict[str, int], longest: float) -> str:
    out = []
    at = 0.0
    for part in sorted(parts, key=lambda p: keys[p.name]):
        width = 100 * part.seconds / longest
        key = keys[part.name]
        tip = f"{part.name}: {wording.seconds(part.seconds)}"
        out.append(
            f'<g><title>{esc(tip)}</title><rect class="hue{(key - 1) % _HUES}" x="{at:.3f}%" width="{width:.3f}%"'
            ' y="0" height="100%"/>'
        )
        if width >= _ROOM_FOR_KEY:
            out.append(f'<text x="{at + width / 2:.3f}%" y="50%" dy="0.35em" text-anchor="middle">{key}</text>')
        out.append("</g>")
        at += width
    return "".join(out)


def _numbers(report: ReportData, title: str, times: dict[int, list[TimePart]], used: list[str]) -> str:
    rows: list[Row] = []
    for i, parts in times.items():
        by_name = {p.name: p.seconds for p in parts}
        total = sum(by_name.values())
        cells: list[Cell | None] = [Cell(name(report.models[i].name)), Cell(wording.seconds(total), total)]
        for key in used:
            cells.append(Cell(wording.seconds(by_name[key]), by_name[key]) if key in by_name else None)
        rows.append((i, cells))
    return table(f"{title}, in numbers", ["model", "together", *used], rows)


def _swatch(key: int) -> str:
    return (
        f'<svg class="swatch" aria-hidden="true"><rect class="hue{(key - 1) % _HUES}" width="100%" height="100%"/>'
        f'<text x="50%" y="50%" dy="0.35em" text-anchor="middle">{key}</text></svg>'
    )
