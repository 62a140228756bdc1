"""The plot of accuracy against speed, as SVG that also stands alone in a paper."""

from __future__ import annotations

import itertools
import math

from . import wording
from .axes import Axis, nice_step, tick_text
from .labels import Box, Disc, place, text_width
from .markup import esc
from .measures import Measure, accuracy, cost
from .report import ReportData

_LONGEST_NAME = 30
# Attributes, which any rule of the page's style sheet overrides: outside the page they are all the style there is.
_INK, _SOFT, _GRID, _HUE = "#1a1a1a", "#5c5c5c", "#e3e1dc", "#0b5cad"
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


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


def pareto_svg(report: ReportData, width: int = 760) -> str | None:
    """Accuracy upwards and speed to the right; None if fewer than two models have both.

    Speed is decoding if any model's was measured, else the checkpoint's bytes. Accuracy is perplexity, or bits
    per byte where models read different tokens, or the mean of the tasks. A model without both is not drawn.
    """
    good, fast, models = accuracy(report), cost(report), drawn_models(report)
    if good is None or len(models) < 2:
        return None
    return _Plot(report, fast, good, models, width).svg()


class _Plot:
    def __init__(self, report: ReportData, x: Measure, y: Measure, models: list[int], width: int) -> None:
        self.report, self.x, self.y, self.models, self.width = report, x, y, models, width
        self.size = 13 if width > 500 else 12
        self.height = round(width * (0.56 if width > 500 else 0.95)) + 60
        self.left, self.right, self.top, self.bottom = 52, width - 14, 74 if width > 500 else 98, self.height - 46
        largest = max(report.models[i].size.bytes for i in models)
        self.most = (22 if width > 500 else 16) * (1 if len(models) <= 8 else 0.7)
        self.per_byte = self.most**2 / largest
        room = self.most + 4
        self.across = Axis.around(_extent(x, models), self.left + room, self.right - room)
        up, down = self.top + room, self.bottom - room
        self.up = Axis.around(_extent(y, models), *((down, up) if y.better_high else (up, down)))
        best = front([(x.goodness(i), y.goodness(i)) for i in models])
        self.front = {models[i] for i in best}

    def svg(self) -> str:
        said = f"{self.y.title} against {self.x.title[0].lower()}{self.x.title[1:]}, {len(self.models)} models"
        # Large discs first, so that small ones stay in reach of the pointer.
        order = sorted(self.models, key=lambda i: -self.report.models[i].size.bytes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pareto" viewBox="0 0 {self.width} {self.height}" '
            f'role="group" aria-label="{esc(said)}" font-family="{_FONT}" font-size="{self.size}">'
            + self._legend()
            + self._axes()
            + self._step_line()
            + "".join(self._point(i) for i in order)
            + self._labels()
            + "</svg>"
        )

    def _axes(self) -> str:
        out = []
        for value in self.up.ticks():
            y = self.up.at(value)
            out.append(_line(self.left, y, self.right, y, "grid", _GRID))
            out.append(_text(self.left - 8, y + 4, tick_text(value), "tick", "end"))
        for value in self.across.ticks(6 if self.width > 500 else 4):
            x = self.across.at(value)
            out.append(_line(x, self.bottom, x, self.bottom + 5, "axis", _SOFT))
            out.append(_text(x, self.bottom + 19, tick_text(value), "tick", "middle"))
        out.append(_line(self.left, self.bottom, self.right, self.bottom, "axis", _SOFT))
        up = "" if self.y.better_high else ", lower is better"
        scale = ", log scale"
        title = f"↑ {_short(self.y.title, 44 if self.width > 500 else 23)}{up}{scale if self.up.log else ''}"
        out.append(_text(0, self.top - 12, title, "title", "start"))
        along = f"{self.x.title} →" if self.x.better_high else f"← {self.x.title}, less is better"
        out.append(_text(self.right, self.bottom + 40, f"{along}{scale if self.across.log else ''}", "title", "end"))
        return "".join(out)

    def _steps(self) -> list[tuple[float, float]]:
        """The corners of the front's line."""
        at = sorted((self.across.at(self.x.values[i]), self.up.at(self.y.values[i])) for i in self.front)
        corners = at[:1]
        for (x0, y0), (x1, y1) in itertools.pairwise(at):
            # The corner lies where both neighbours are beaten: what the front does not promise is not claimed.
            corners += [(x0, y1) if self.x.better_high else (x1, y0), (x1, y1)]
        return corners

    def _step_line(self) -> str:
        corners = self._steps()
        if len(corners) < 2:
            return ""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        return f'<path class="front" d="{path}" fill="none" stroke="{_HUE}" stroke-width="1.25" stroke-opacity="0.7"/>'

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
        radius = math.sqrt(self.per_byte * self.report.models[i].size.bytes)
        return Disc(self.across.at(self.x.values[i]), self.up.at(self.y.values[i]), radius)

    def _point(self, i: int) -> str:
        model, disc = self.report.models[i], self._disc(i)
        kind = "baseline" if model.role == "baseline" else "candidate"
        reached = "on" if i in self.front else "off"
        tip = [model.name, self.x.said[i], self.y.said[i], f"checkpoint {wording.bytes_(model.size.bytes)}"]
        if kind == "baseline":
            tip[0] += " (baseline)"
        tip.append("on the Pareto front" if reached == "on" else "")
        hue = _INK if kind == "baseline" else _HUE
        out = [
            f'<g class="point {kind} {reached}" data-model="{i}" tabindex="0" role="img"'
            f' aria-label="{esc("; ".join(t for t in tip if t))}"><title>{esc(chr(10).join(t for t in tip if t))}</title>'
        ]
        out += [_line(*bar, "error", hue) for bar in self._bars(i)]
        dashes = "" if reached == "on" else ' stroke-dasharray="3 2.5"'
        out.append(
            f'<circle class="area" cx="{disc.x:.1f}" cy="{disc.y:.1f}" r="{disc.radius:.1f}" fill="{hue}"'
            f' fill-opacity="0.13" stroke="{hue}" stroke-width="1.25"{dashes}/>'
        )
        out.append(_mark(disc.x, disc.y, kind, hue))
        # A small checkpoint's disc is hard to hit with a finger.
        out.append(
            f'<circle class="reach" cx="{disc.x:.1f}" cy="{disc.y:.1f}" r="{max(11, disc.radius):.1f}" fill="none"/>'
        )
        return "".join(out) + "</g>"

    def _labels(self) -> str:
        names = [_short(self.report.models[i].name, _LONGEST_NAME) for i in self.models]
        discs = [self._disc(i) for i in self.models]
        roles = [self.report.models[i].role for i in self.models]
        order = sorted(range(len(names)), key=lambda k: (roles[k] != "baseline", self.models[k] not in self.front))
        lines = [bar for i in self.models for bar in self._bars(i)]
        lines += [(*a, *b) for a, b in itertools.pairwise(self._steps())]
        lines = [(min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1) for x0, y0, x1, y1 in lines]
        found = place(discs, names, order, (0, self.top, self.width, self.bottom), self.size, lines)
        return "".join(
            _text(at.x, at.y, text, "name", at.anchor) for at, text in zip(found, names, strict=True) if at is not None
        )

    def _legend(self) -> str:
        y, x = 24.0, 0.0
        out = []
        largest = max(self.report.models[i].size.bytes for i in self.models)
        step = nice_step(largest / 2)
        for count in (step / 4, step, step * 2):
            radius = math.sqrt(self.per_byte * count)
            if count > largest * 1.3 or radius < 2:
                continue
            text = wording.bytes_(count).replace(".0 ", " ")
            out.append(
                f'<circle class="key" cx="{x + radius:.1f}" cy="{y}" r="{radius:.1f}" fill="none" stroke="{_SOFT}"/>'
            )
            out.append(_text(x + 2 * radius + 5, y + 4, text, "tick", "start"))
            x += 2 * radius + 5 + text_width(text, self.size) + 14
        out.append(_text(x - 6, y + 4, "checkpoint (area)", "tick", "start"))
        x += text_width("checkpoint (area)", self.size) + 18
        if self.width <= 500:
            x, y = 0, 54.0
        out.append(f'<path class="front" d="M{x} {y + 5}h9v-10h9" fill="none" stroke="{_HUE}" stroke-width="1.25"/>')
        out.append(_text(x + 24, y + 4, "Pareto front", "tick", "start"))
        x += 24 + text_width("Pareto front", self.size) + 16
        out.append(
            f'<circle class="key" cx="{x + 7}" cy="{y}" r="7" fill="none" stroke="{_SOFT}" stroke-dasharray="3 2.5"/>'
        )
        out.append(_text(x + 20, y + 4, "behind it", "tick", "start"))
        x += 20 + text_width("behind it", self.size) + 16
        if any(self.report.models[i].role == "baseline" for i in self.models):
            out.append(_mark(x + 4, y, "baseline", _INK))
            out.append(_text(x + 14, y + 4, "baseline", "tick", "start"))
        return "".join(out)


def _extent(measure: Measure, models: list[int]) -> list[float]:
    values = [measure.values[i] for i in models]
    bounds = [b for i in models for b in measure.intervals.get(i, ())]
    return values + bounds


def _mark(x: float, y: float, kind: str, hue: str) -> str:
    if kind == "baseline":
        return f'<path class="mark" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" fill="{hue}"/>'
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{hue}"/>'


def _line(x0: float, y0: float, x1: float, y1: float, kind: str, hue: str) -> str:
    return f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{hue}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    hue = _INK if kind == "name" else _SOFT
    halo = ' stroke="#fff" stroke-width="3" stroke-linejoin="round" paint-order="stroke"' if kind == "name" else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{hue}"{halo}>{esc(text)}</text>'


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
