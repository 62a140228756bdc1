"""What quantizing each linear cost, worst first."""

from __future__ import annotations

import math
import statistics

from ..results.result import Layer, ModelResult
from . import wording
from .markup import esc, fold, name
from .report import ReportData

_SHOWN = 20
_OPEN = 3
NOT_REACHED = "no calibration token reached it"
_MEANS = {
    "outputs": "The output error is |X(W − Q)| / |XW| over calibration inputs X: the share of a linear’s output that"
    " quantizing it changed.",
    "weights": "The weight error is |W − Q| / |W|: no calibration text was read, so nothing is known of outputs.",
}


def layer_bars(report: ReportData) -> str:
    """A chart for each model with layers; all have the same scale."""
    models = [model for model in report.models if model.layers]
    largest = max((e for model in models for e in _errors(model) if math.isfinite(e)), default=0)
    charts = [_chart(model, largest, opened=len(models) <= _OPEN) for model in models]
    kinds = {layer.error_of for model in models for layer in model.layers}
    said = " ".join(sentence for kind, sentence in _MEANS.items() if kind in kinds)
    note = f'<p class="note">{said} All bars have one scale.</p>'
    return note + "".join(charts) if charts else ""


def _chart(model: ModelResult, largest: float, *, opened: bool) -> str:
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
    rest = layers[_SHOWN:]
    body = _rows(layers[:_SHOWN], largest) + fold(f"the other {len(rest)}", _rows(rest, largest) if rest else "")
    return fold(f"{name(model.name)} <small>{esc(said)}</small>", f'<div class="layers">{body}</div>', opened=opened)


def _errors(model: ModelResult) -> list[float]:
    return [layer.error for layer in model.layers if layer.error is not None]


def _rows(layers: list[Layer], largest: float) -> str:
    out = []
    for layer in layers:
        shape = "×".join(map(str, layer.shape))
        head = f"<span><code>{esc(layer.name)}</code> <small>{esc(layer.scheme)}, {esc(shape)}</small></span>"
        if layer.error is None:
            out.append(f'<li>{head}<span class="unknown">{NOT_REACHED}</span></li>')
            continue
        beyond = not math.isfinite(layer.error)
        width = 100 if beyond else 100 * layer.error / largest if largest > 0 else 0
        bar = f'<svg aria-hidden="true"><rect width="{width:.2f}%" height="100%"/></svg>'
        out.append(f"<li>{head}{bar}<span>{wording.number(layer.error)}</span></li>")
    return f"<ol>{''.join(out)}</ol>"
