"""Quantization error of each linear, worst first."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ...results.result import Layer, ModelResult

_SHOWN = 20
_OPEN = 3
_MEANS = {
    "outputs": "The output error is |X(W − Q)| / |XW| over calibration inputs X: the relative change of a linear’s"
    " outputs.",
    "weights": "The weight error is |W − Q| / |W|: no calibration text was read, so the output error is unknown.",
}


@dataclass(frozen=True)
class Bar:
    """One linear's error.

    Attributes:
        name, about: its own, and its scheme and shape.
        error: in words; None where no calibration token reached the linear.
        width: of the bar, in percent of the widest.
    """

    name: str
    about: str
    error: str | None
    width: float


@dataclass(frozen=True)
class Chart:
    """A model's linears; only the first are visible until opened."""

    name: str
    said: str
    shown: list[Bar]
    rest: list[Bar]


@dataclass(frozen=True)
class Charts:
    """The charts of all models with layers, which share a scale; few of them are opened."""

    note: str
    charts: list[Chart]
    opened: bool


def layer_bars(report: ReportData) -> Charts | None:
    """A chart for each model with layers; all have the same scale. None where no model has any."""
    models = [model for model in report.models if model.layers]
    if not models:
        return None
    largest = max((e for model in models for e in _errors(model) if math.isfinite(e)), default=0)
    kinds = {layer.error_of for model in models for layer in model.layers}
    said = " ".join(sentence for kind, sentence in _MEANS.items() if kind in kinds)
    return Charts(
        f"{said} All bars share one scale.", [_chart(model, largest) for model in models], len(models) <= _OPEN
    )


def _chart(model: ModelResult, largest: float) -> Chart:
    layers = model.layers
    known = _errors(model)
    said = f"{len(layers)} linear{'' if len(layers) == 1 else 's'}"
    if known:
        of = " and ".join(
            {"outputs": "output", "weights": "weight"}[kind] for kind in sorted({x.error_of for x in layers})
        )
        said += f", median {of} error {wording.number(statistics.median(known))}, worst {wording.number(max(known))}"
    if unknown := len(layers) - len(known):
        said += f", {unknown} not reached"
    bars = [_bar(layer, largest) for layer in layers]
    return Chart(model.name, said, bars[:_SHOWN], bars[_SHOWN:])


def _errors(model: ModelResult) -> list[float]:
    return [layer.error for layer in model.layers if layer.error is not None]


def _bar(layer: Layer, largest: float) -> Bar:
    about = f"{layer.scheme}, {'×'.join(map(str, layer.shape))}"
    if layer.error is None:
        return Bar(layer.name, about, None, 0)
    beyond = not math.isfinite(layer.error)
    width = 100 if beyond else 100 * layer.error / largest if largest > 0 else 0
    return Bar(layer.name, about, wording.number(layer.error), width)
