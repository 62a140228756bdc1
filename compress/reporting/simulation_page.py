"""The page of a simulation: its figures as a table, and distributions as plots. One HTML file that needs no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...runtime.simulate.scenarios.scenario import Simulated, facts, rows
from .plot.plot_axis import Tick
from .templates.rendering import render

_STYLE = Path(__file__).parent / "page" / "style.css"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 300, 52, 14, 44
_POINTS = 200


@dataclass(frozen=True)
class DistributionCurve:
    """One policy's share of requests below each time, as an SVG path."""

    policy: str
    path: str


@dataclass(frozen=True)
class Plot:
    """Cumulative distributions on a logarithmic time axis."""

    title: str
    said: str
    across: list[Tick]
    up: list[Tick]
    curves: list[DistributionCurve]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    top: int = _TOP
    bottom: int = _HEIGHT - _BOTTOM


def simulation_page(found: Simulated) -> str:
    """The whole page."""
    results = [each.result for each in found.compared]
    policies = [each.policy for each in results]
    plots = [
        _plot(
            "First token: seconds from arrival", policies, [[r.first - r.at for r in each.served] for each in results]
        ),
        _plot(
            "Completion: seconds from arrival", policies, [[r.ended - r.at for r in each.served] for each in results]
        ),
        _plot(
            "Completion per generated token, in seconds",
            policies,
            [[(r.ended - r.at) / r.output for r in each.served] for each in results],
        ),
    ]
    return render(
        "simulation.html.jinja",
        style=_STYLE.read_text(encoding="utf-8"),
        requests=results[0].requests,
        facts=facts(found),
        policies=policies,
        rows=rows(found),
        plots=plots,
        predicted=found.device.kind == "predicted",
    )


def _plot(title: str, policies: Sequence[str], values: Sequence[Sequence[float]]) -> Plot:
    everything = [value for each in values for value in each]
    low = math.floor(math.log10(max(1e-6, min(everything))))
    high = max(low + 1, math.ceil(math.log10(max(1e-6, *everything))))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - 12

    def across(value: float) -> float:
        return _LEFT + (right - _LEFT) * (math.log10(max(10.0**low, value)) - low) / (high - low)

    def up(share: float) -> float:
        return bottom - (bottom - _TOP) * share

    curves = []
    for policy, mine in zip(policies, values, strict=True):
        ordered = sorted(mine)
        count = min(_POINTS, len(ordered))
        places = [round(i * (len(ordered) - 1) / max(1, count - 1)) for i in range(count)]
        path = " ".join(f"{across(ordered[i]):.1f},{up((i + 1) / len(ordered)):.1f}" for i in places)
        curves.append(DistributionCurve(policy, path))
    medians = ", ".join(
        f"{name} {sorted(mine)[len(mine) // 2]:.3g}" for name, mine in zip(policies, values, strict=True)
    )
    return Plot(
        title,
        f"{title}. Medians: {medians}",
        [Tick(f"{10.0**power:g}", across(10.0**power)) for power in range(low, high + 1)],
        [Tick(f"{25 * share}%", up(share / 4)) for share in range(5)],
        curves,
    )
