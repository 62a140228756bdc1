"""How training went: the loss over tokens, losses on held-out text, and text generated on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ...results.result import ModelResult, TrainingPoint, TrainingRecord
from ..plot.plot_axis import PlotAxis, Tick
from ..tables.table import Cell, Row, Table, table

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 760, 300, 52, 14, 40, 30
# The report's names of losses.
_CALLED = {"teacher": "from the teacher", "text": "of the text", "hidden": "of hidden states"}
_LEAST_POINTS = 2


@dataclass(frozen=True)
class Line:
    """A curve's points, and where its name is written."""

    title: str
    points: list[tuple[float, float]]
    key: float


@dataclass(frozen=True)
class CurvePlot:
    """The curves of one training, in a box of these sizes."""

    said: str
    up: list[Tick]
    across: list[Tick]
    lines: list[Line]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT
    bottom: int = _HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Curve:
    """What is shown of one training.

    Attributes:
        name: of the model.
        said: which training it was.
        plot: None where too little was measured.
        held_out: losses on held-out text.
        samples: prompts, and for each the texts with the step after which they were written.
    """

    name: str
    said: str
    plot: CurvePlot | None
    held_out: Table | None
    samples: list[tuple[str, list[tuple[int, str]]]]


def training_curves(report: ReportData) -> list[Curve]:
    """A plot and the samples for each training of each model; nothing where nothing was trained."""
    return [_curve(model, each) for model in report.models for each in model.training]


def _curve(model: ModelResult, training: TrainingRecord) -> Curve:
    last = training.curve[-1]
    said = f"step {training.step} of the recipe, {last.tokens:,} tokens"
    skipped = f", {training.skipped} steps skipped" if training.skipped else ""
    return Curve(model.name, said + skipped, _plot(training), _held_out(training), _samples(training))


def _plot(training: TrainingRecord) -> CurvePlot | None:
    found = _lines(training.curve)
    curves = {title: points for title, points in found.items() if len(points) >= _LEAST_POINTS}
    values = [value for points in curves.values() for _, value in points if math.isfinite(value)]
    if not values:
        return None
    across = PlotAxis(0.0, max(1.0, float(training.curve[-1].tokens)), _LEFT, _WIDTH - _RIGHT, log=False)
    up = PlotAxis.around(values, _HEIGHT - _BOTTOM, _TOP)
    lines = []
    x = 0.0
    for title, points in curves.items():
        lines.append(Line(title, [(across.at(tokens), up.at(value)) for tokens, value in points], x))
        x += 40 + 7.2 * len(title)
    said = f"The loss over {training.curve[-1].tokens:,} tokens{', log scale' if up.log else ''}"
    return CurvePlot(said, up.marks(5), across.marks(), lines)


def _lines(curve: list[TrainingPoint]) -> dict[str, list[tuple[float, float]]]:
    lines = {"training loss": [(float(p.tokens), p.loss) for p in curve if p.loss is not None]}
    parts = dict.fromkeys(part for p in curve for part in p.held_out or {})
    if "teacher" in parts:
        parts.pop("text", None)  # far from the training loss, and listed in the table
    for part in parts:
        title = f"held-out text: {_CALLED.get(part, part)}"
        lines[title] = [(float(p.tokens), p.held_out[part]) for p in curve if p.held_out and part in p.held_out]
    return lines


def _held_out(training: TrainingRecord) -> Table | None:
    measured = [point for point in training.curve if point.held_out]
    if not measured:
        return None
    parts = list(dict.fromkeys(part for point in measured for part in point.held_out or {}))
    rows: list[Row] = [
        (None, [Cell(f"{point.tokens:,}", point.tokens), *(_cell(point, part) for part in parts)]) for point in measured
    ]
    heads = ["tokens", *(_CALLED.get(part, part) for part in parts)]
    return table("On held-out text", heads, rows)


def _cell(point: TrainingPoint, part: str) -> Cell | None:
    value = (point.held_out or {}).get(part)
    return None if value is None else Cell(wording.fixed(value, 4), value)


def _samples(training: TrainingRecord) -> list[tuple[str, list[tuple[int, str]]]]:
    first = training.samples[0].texts if training.samples else []
    return [
        (
            text.prompt,
            [(each.step, each.texts[i].text) for each in training.samples if i < len(each.texts)],
        )
        for i, text in enumerate(first)
    ]
