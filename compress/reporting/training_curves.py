"""How training went: the loss over tokens, what was measured on text kept aside, and text written on the way."""

from __future__ import annotations

import math

from ..results.result import ModelResult, Training, TrainingPoint
from . import wording
from .axes import Axis, tick_text
from .markup import Cell, Row, esc, fold, name, table
from .report import ReportData

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 300, 52, 40, 30
# What loses by name, as the report calls it.
_CALLED = {"teacher": "from the teacher", "text": "of the text", "hidden": "of hidden states"}
_LEAST_POINTS = 2


def training_curves(report: ReportData) -> str:
    """A plot and the samples for each training of each model; nothing where nothing was trained."""
    return "".join(_curve(model, each) for model in report.models for each in model.training)


def _curve(model: ModelResult, training: Training) -> str:
    last = training.curve[-1]
    said = f"step {training.step} of the recipe, {last.tokens:,} tokens"
    skipped = f", {training.skipped} steps passed over" if training.skipped else ""
    return f"<h3>{name(model.name)} <small>{esc(said + skipped)}</small></h3>{_plot(training)}{_held_out(training)}{_samples(training)}"


def _plot(training: Training) -> str:
    found = _lines(training.curve)
    lines = {title: points for title, points in found.items() if len(points) >= _LEAST_POINTS}
    values = [value for points in lines.values() for _, value in points if math.isfinite(value)]
    if not values:
        return ""
    across = Axis(0.0, max(1.0, float(training.curve[-1].tokens)), _LEFT, _WIDTH - 14, log=False)
    up = Axis.around(values, _HEIGHT - _BOTTOM, _TOP)
    out = []
    for value in up.ticks(5):
        y = up.at(value)
        out.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 14}" y2="{y:.1f}" stroke="#e3e1dc"/>')
        out.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick_text(value)}</text>')
    for value in across.ticks():
        x = across.at(value)
        out.append(
            f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick_text(value)}</text>'
        )
    out.append(f'<text class="title" x="{_WIDTH - 14}" y="{_HEIGHT - 4}" text-anchor="end">tokens →</text>')
    x = 0.0
    for number, (title, points) in enumerate(lines.items()):
        path = "L".join(f"{across.at(tokens):.1f} {up.at(value):.1f}" for tokens, value in points)
        out.append(f'<path class="line line{number}" d="M{path}" fill="none" stroke-width="1.5"/>')
        out.append(f'<path class="line line{number}" d="M{x:.0f} 9h18" fill="none" stroke-width="3"/>')
        out.append(f'<text class="tick" x="{x + 24:.0f}" y="13">{esc(title)}</text>')
        x += 40 + 7.2 * len(title)
    told = f"The loss over {training.curve[-1].tokens:,} tokens{', in logarithms' if up.log else ''}"
    return (
        f'<figure class="plot"><svg xmlns="http://www.w3.org/2000/svg" class="pareto curve" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' role="img" aria-label="{esc(told)}" font-size="13">{"".join(out)}</svg></figure>'
    )


def _lines(curve: list[TrainingPoint]) -> dict[str, list[tuple[float, float]]]:
    lines = {"what was minimised": [(float(p.tokens), p.loss) for p in curve if p.loss is not None]}
    parts = dict.fromkeys(part for p in curve for part in p.held_out or {})
    if "teacher" in parts:
        parts.pop("text", None)  # which is far from what is minimised, and stands in the table
    for part in parts:
        title = f"text kept aside: {_CALLED.get(part, part)}"
        lines[title] = [(float(p.tokens), p.held_out[part]) for p in curve if p.held_out and part in p.held_out]
    return lines


def _held_out(training: Training) -> str:
    measured = [point for point in training.curve if point.held_out]
    if not measured:
        return ""
    parts = list(dict.fromkeys(part for point in measured for part in point.held_out or {}))
    rows: list[Row] = [
        (None, [Cell(f"{point.tokens:,}", point.tokens), *(_cell(point, part) for part in parts)]) for point in measured
    ]
    heads = ["tokens", *(_CALLED.get(part, part) for part in parts)]
    return fold("On text kept aside, in nats", table("On text kept aside", heads, rows))


def _cell(point: TrainingPoint, part: str) -> Cell | None:
    value = (point.held_out or {}).get(part)
    return None if value is None else Cell(wording.fixed(value, 4), value)


def _samples(training: Training) -> str:
    out = []
    for i, first in enumerate(training.samples[0].texts if training.samples else []):
        columns = "".join(
            f'<article class="sample"><h4>after step {each.step}</h4><p dir="auto">{esc(each.texts[i].text)}</p></article>'
            for each in training.samples
            if i < len(each.texts)
        )
        out.append(
            f'<h4 class="prompt"><span>Prompt</span> {esc(first.prompt)}</h4><div class="samples">{columns}</div>'
        )
    return fold("What it wrote as it learned", "".join(out)) if out else ""
