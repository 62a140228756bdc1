"""All models of a report, each in a line."""

from __future__ import annotations

from ...results import wording
from ...results.report import ReportData
from ...results.result import Against, ModelResult, Speed
from .table import Cell, Row, Table, table


def models_table(report: ReportData) -> Table | None:
    """Size, accuracy and speed of each; None if nothing was measured."""
    rows: list[Row] = []
    for i, model in enumerate(report.models):
        size, text, speed = model.size, model.text, model.speed
        linear = size.linear_bits_per_weight if size is not None else None
        cells: list[Cell | None] = [
            named(report, model),
            Cell(model.scheme),
            None if size is None else Cell(wording.bytes_(size.bytes), size.bytes),
            None if size is None else Cell(wording.fixed(size.bits_per_weight, 2), size.bits_per_weight),
            None if linear is None else Cell(wording.fixed(linear, 2), linear),
            None if text is None else Cell(wording.perplexity(text.perplexity), text.perplexity),
            None if speed is None else _decoding(speed, model.against),
        ]
        rows.append((i, cells))
    heads = ["model", "scheme", "checkpoint", "bits per weight", "in quantized linears", "perplexity"]
    return table("Models", [*heads, "decode, tokens/s"], rows, words=["scheme"])


def _decoding(speed: Speed, against: Against | None) -> Cell:
    change = against.decode if against is not None else None
    median = speed.decode_rate.median
    return Cell(wording.number(median), median, notes=() if change is None else (wording.speedup(change.ratio),))


def named(report: ReportData, model: ModelResult) -> Cell:
    """A model's name as the first cell of a row, with its role where it is the baseline."""
    tag = "baseline" if model.role == "baseline" and len(report.models) > 1 else ""
    return Cell(model.name, model.name, notes=(tag,), kind="name")
