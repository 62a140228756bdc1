"""The plot of accuracy against speed, as standalone SVG."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ..templates.rendering import render
from .labels import Box, Disc, Label, place, text_width
from .measures import Measure, accuracy, cost
from .plot_axis import PlotAxis, Tick, nice_step

_LONGEST_NAME = 30
# Its checkpoint's bytes are not known.
_SERVERS_RADIUS = 6.0


def front(points: list[tuple[float, float]]) -> list[int]:
    """Positions of the points that no other point beats: more is better in both coordinates."""

    def beaten(p: tuple[float, float]) -> bool:
        return any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in points)

    return [i for i, p in enumerate(points) if not beaten(p)]


def drawn_models(report: ReportData) -> list[int]:
    """Positions of the models that the plot shows: those of which both quantities were measured."""
    good = accuracy(report)
    fast = cost(report)
    return [i for i in range(len(report.models)) if good is not None and i in good.values and i in fast.values]


@dataclass(frozen=True)
class Point:
    """A model's disc, with its tooltip.

    Attributes:
        model: its position in the report.
        kind: ``baseline`` or ``candidate``.
        on_front: whether no other model beats it.
        tip: lines of text.
        bars: the lines of its intervals.
        disc: its position, and an area proportional to the checkpoint's bytes.
    """

    model: int
    kind: str
    on_front: bool
    tip: list[str]
    bars: list[Box]
    disc: Disc


@dataclass(frozen=True)
class LegendEntry:
    """A mark in the legend, from ``x`` on, and its text.

    Attributes:
        mark: ``area``, ``front``, ``behind``, ``baseline``, or none.
        x, y: where the mark is; ``y`` is its middle.
        radius: of an area.
        text, text_at: what it means, and where that begins.
    """

    mark: str
    x: float
    y: float
    text: str
    text_at: float
    radius: float = 0


@dataclass(frozen=True)
class ParetoPlot:
    """All that is drawn, with places in a box of ``width`` by ``height``.

    Attributes:
        width, height, size: of the box, and of the font.
        left, right, top, bottom: of the part between the axes.
        said: what the plot is of.
        legend: above everything.
        up, across: the axes' ticks, and what they are of.
        front: corners of the front's line; none for fewer than two models on it.
        points: large ones first, so that small ones stay in reach of the pointer.
        names: those for which there was room.
    """

    width: int
    height: int
    size: int
    left: int
    right: int
    top: int
    bottom: int
    said: str
    legend: list[LegendEntry]
    up: list[Tick]
    up_title: str
    across: list[Tick]
    across_title: str
    front: list[tuple[float, float]]
    points: list[Point]
    names: list[tuple[Label, str]]


def pareto(report: ReportData, width: int = 760) -> ParetoPlot | None:
    """Accuracy upwards and speed to the right; None if fewer than two models have both.

    Speed is decoding if any model's was measured, else the checkpoint's bytes. Accuracy is perplexity, or bits
    per byte where models read different tokens, or the mean of the tasks. A model without both is not drawn.
    """
    good, fast, models = accuracy(report), cost(report), drawn_models(report)
    if good is None or len(models) < 2:
        return None
    return _Layout(report, fast, good, models, width).plot()


def pareto_svg(report: ReportData, width: int = 760) -> str | None:
    """:func:`pareto` as SVG that needs no style sheet."""
    plot = pareto(report, width)
    return None if plot is None else render("pareto.svg.jinja", plot=plot)


class _Layout:
    def __init__(self, report: ReportData, x: Measure, y: Measure, models: list[int], width: int) -> None:
        self.report, self.x, self.y, self.models, self.width = report, x, y, models, width
        self.size = 13 if width > 500 else 12
        self.height = round(width * (0.56 if width > 500 else 0.95)) + 60
        self.left, self.right, self.top, self.bottom = 52, width - 14, 74 if width > 500 else 98, self.height - 46
        self.bytes = {i: size.bytes for i in models if (size := report.models[i].size) is not None}
        self.most = (22 if width > 500 else 16) * (1 if len(models) <= 8 else 0.7)
        self.per_byte = self.most**2 / max(self.bytes.values(), default=1)
        room = self.most + 4
        self.across = PlotAxis.around(_extent(x, models), self.left + room, self.right - room)
        up, down = self.top + room, self.bottom - room
        self.up = PlotAxis.around(_extent(y, models), *((down, up) if y.better_high else (up, down)))
        best = front([(x.goodness(i), y.goodness(i)) for i in models])
        self.front = {models[i] for i in best}

    def plot(self) -> ParetoPlot:
        corners = self._steps()
        up_title, across_title = self._titles()
        order = sorted(self.models, key=lambda i: -self._disc(i).radius)
        return ParetoPlot(
            width=self.width,
            height=self.height,
            size=self.size,
            left=self.left,
            right=self.right,
            top=self.top,
            bottom=self.bottom,
            said=f"{self.y.title} against {self.x.title[0].lower()}{self.x.title[1:]}, {len(self.models)} models",
            legend=self._legend(),
            up=self.up.marks(),
            up_title=up_title,
            across=self.across.marks(6 if self.width > 500 else 4),
            across_title=across_title,
            front=corners if len(corners) >= 2 else [],
            points=[self._point(i) for i in order],
            names=self._names(),
        )

    def _titles(self) -> tuple[str, str]:
        up = "" if self.y.better_high else ", lower is better"
        scale = ", log scale"
        rising = f"↑ {_short(self.y.title, 44 if self.width > 500 else 23)}{up}{scale if self.up.log else ''}"
        along = f"{self.x.title} →" if self.x.better_high else f"← {self.x.title}, less is better"
        return rising, f"{along}{scale if self.across.log else ''}"

    def _steps(self) -> list[tuple[float, float]]:
        """The corners of the front's line."""
        at = sorted((self.across.at(self.x.values[i]), self.up.at(self.y.values[i])) for i in self.front)
        corners = at[:1]
        for (x0, y0), (x1, y1) in itertools.pairwise(at):
            # The corner is where both neighbours are better, so that the line claims nothing beyond the front.
            corners += [(x0, y1) if self.x.better_high else (x1, y0), (x1, y1)]
        return corners

    def _bars(self, i: int) -> list[Box]:
        """The lines of a point's intervals."""
        x, y = self.across.at(self.x.values[i]), self.up.at(self.y.values[i])
        out: list[Box] = []
        if bounds := self.x.intervals.get(i):
            out.append((self.across.at(bounds[0]), y, self.across.at(bounds[1]), y))
        if bounds := self.y.intervals.get(i):
            out.append((x, self.up.at(bounds[0]), x, self.up.at(bounds[1])))
        return out

    def _disc(self, i: int) -> Disc:
        radius = math.sqrt(self.per_byte * self.bytes[i]) if i in self.bytes else _SERVERS_RADIUS
        return Disc(self.across.at(self.x.values[i]), self.up.at(self.y.values[i]), radius)

    def _point(self, i: int) -> Point:
        model = self.report.models[i]
        is_baseline, on_front = model.role == "baseline", i in self.front
        tip = [
            f"{model.name} (baseline)" if is_baseline else model.name,
            self.x.said[i],
            self.y.said[i],
            f"checkpoint {wording.bytes_(model.size.bytes)}" if model.size else model.scheme,
            "on the Pareto front" if on_front else "",
        ]
        kind = "baseline" if is_baseline else "candidate"
        return Point(i, kind, on_front, [line for line in tip if line], self._bars(i), self._disc(i))

    def _names(self) -> list[tuple[Label, str]]:
        names = [_short(self.report.models[i].name, _LONGEST_NAME) for i in self.models]
        discs = [self._disc(i) for i in self.models]
        roles = [self.report.models[i].role for i in self.models]
        order = sorted(range(len(names)), key=lambda k: (roles[k] != "baseline", self.models[k] not in self.front))
        lines = [bar for i in self.models for bar in self._bars(i)]
        lines += [(*a, *b) for a, b in itertools.pairwise(self._steps())]
        lines = [(min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1) for x0, y0, x1, y1 in lines]
        found = place(discs, names, order, (0, self.top, self.width, self.bottom), self.size, lines)
        return [(at, text) for at, text in zip(found, names, strict=True) if at is not None]

    def _legend(self) -> list[LegendEntry]:
        y, x = 24.0, 0.0
        out = []
        largest = max(self.bytes.values(), default=0)
        step = nice_step(largest / 2) if largest else 0
        for count in (step / 4, step, step * 2):
            radius = math.sqrt(self.per_byte * count)
            if count > largest * 1.3 or radius < 2:
                continue
            text = wording.bytes_(count).replace(".0 ", " ")
            out.append(LegendEntry("area", x, y, text, x + 2 * radius + 5, radius))
            x += 2 * radius + 5 + text_width(text, self.size) + 14
        if largest:
            out.append(LegendEntry("", x, y, "checkpoint (area)", x - 6))
            x += text_width("checkpoint (area)", self.size) + 18
        if self.width <= 500:
            x, y = 0, 54.0
        out.append(LegendEntry("front", x, y, "Pareto front", x + 24))
        x += 24 + text_width("Pareto front", self.size) + 16
        out.append(LegendEntry("behind", x, y, "behind it", x + 20))
        x += 20 + text_width("behind it", self.size) + 16
        if any(self.report.models[i].role == "baseline" for i in self.models):
            out.append(LegendEntry("baseline", x, y, "baseline", x + 14))
        return out


def _extent(measure: Measure, models: list[int]) -> list[float]:
    values = [measure.values[i] for i in models]
    bounds = [b for i in models for b in measure.intervals.get(i, ())]
    return values + bounds


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
