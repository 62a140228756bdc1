"""A report as Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence

from ..results.report import ReportData
from ..results.wording import bytes_
from .tables.accuracy_tables import accuracy_tables
from .tables.models_table import models_table
from .tables.speed_tables import speed_tables
from .tables.table import Cell, Table

_SHOWN_LAYERS = 20
_MEANS = {
    "outputs": "The output error is |X(W - Q)| / |XW| over a sample of the calibration inputs X that the quantized blocks"
    " before the layer produce.",
    "weights": "The weight error is |W - Q| / |W|: no calibration text was read, so the output error is unknown.",
}


def markdown(report: ReportData, plot: str | None = None) -> str:
    """The whole report.

    Args:
        report: what to write.
        plot: the file of the plot, in the same directory.
    """
    out = [f"# {plain(report.title)}", "", f"**{plain(report.verdict)}**", ""]
    if report.status == "partial":
        out += [f"> Partial: {', '.join(map(plain, report.missing))} not measured.", ""]
    out += _overview(report)
    if plot is not None:
        out += [f"![Accuracy against speed]({plot})", ""]
    for section in (
        _tables,
        _reasons,
        _training,
        _layers,
        _samples,
        _loaders,
        _notes,
        _recipes,
        _origin,
    ):
        out += section(report)
    return "\n".join(out).rstrip() + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """A Markdown table; the first ``left`` columns hold words, the others numbers. Empty without rows."""
    return _lines(header, rows, [i >= left for i in range(len(header))])


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]], of_numbers: Sequence[bool]) -> list[str]:
    body = ["| " + " | ".join(plain(cell) for cell in row) + " |" for row in rows]
    if not body:
        return []
    rule = "|".join("---:" if numbers else "---" for numbers in of_numbers)
    return [f"| {' | '.join(header)} |", f"|{rule}|", *body, ""]


def plain(text: str) -> str:
    """External text, escaped so that none of it becomes Markdown or HTML."""
    for mark in "\\`*_[]<>|#~&":
        text = text.replace(mark, "\\" + mark)
    text = re.sub(r"(?i)\b(www)\.", r"\1\\.", text.replace("://", "\\://"))  # the hub links these automatically
    return " ".join(text.split())


def shown(found: Table, *, titled: bool = True) -> list[str]:
    """One of the report's tables, below its caption and its note.

    Args:
        found: the table.
        titled: whether they are shown.
    """
    of_numbers = [column.of_numbers for column in found.columns]
    rows = [[_cell(cell) for cell in cells] for _, cells in found.rows]
    note = [plain(found.note), ""] if found.note else []
    above = [f"## {found.caption}", "", *note] if titled else []
    return [*above, *_lines([column.head for column in found.columns], rows, of_numbers)]


def _cell(cell: Cell | None) -> str:
    """Its text, and its small print in brackets."""
    if cell is None:
        return ""
    notes = "; ".join(note if isinstance(note, str) else _cell(note) for note in cell.notes if note)
    return f"{cell.text} ({notes})" if notes else cell.text


def _overview(report: ReportData) -> list[str]:
    found = models_table(report)
    return [] if found is None else shown(found, titled=False)


def _tables(report: ReportData) -> list[str]:
    return [line for found in (*accuracy_tables(report), *speed_tables(report)) for line in shown(found)]


def _reasons(report: ReportData) -> list[str]:
    lines = [
        f"- {plain(model.name)}: {plain(sentence)}"
        for model in report.candidates
        if model.against
        for sentence in model.against.reasons
    ]
    return ["## Predicted and measured speed", "", *lines, ""] if lines else []


def _training(report: ReportData) -> list[str]:
    out: list[str] = []
    for model in report.models:
        for each in model.training:
            measured = [point for point in each.curve if point.held_out]
            if not measured:
                continue
            parts = list(dict.fromkeys(part for point in measured for part in point.held_out or {}))
            rows = [
                [f"{point.tokens:,}", *(f"{(point.held_out or {}).get(part, math.nan):.4f}" for part in parts)]
                for point in measured
            ]
            out += [f"## Training of {plain(model.name)}, step {each.step}", ""]
            out += table(["tokens", *(f"{part}, held-out text" for part in parts)], rows, left=0)
    return out


def _layers(report: ReportData) -> list[str]:
    out: list[str] = []
    for model in report.models:
        rows = [
            [
                layer.name,
                layer.scheme,
                layer.error_of,
                "no token reached it" if layer.error is None else f"{layer.error:.4f}",
                " x ".join(map(str, layer.shape)),
            ]
            for layer in model.layers[:_SHOWN_LAYERS]
        ]
        if rows:
            shown = (
                f", the worst {_SHOWN_LAYERS} of {len(model.layers)}"
                if len(model.layers) > _SHOWN_LAYERS
                else ", worst first"
            )
            out += [f"## Layers of {plain(model.name)}{shown}", ""]
            out += table(["layer", "scheme", "error of", "relative error", "weight shape"], rows, left=3)
    kinds = {layer.error_of for model in report.models for layer in model.layers}
    for kind, sentence in _MEANS.items():
        if kind in kinds:
            out += [sentence, ""]
    return out


def _samples(report: ReportData) -> list[str]:
    sampled = [m for m in report.models if m.samples]
    if not sampled:
        return []
    out = ["## Samples", ""]
    for i, sample in enumerate(sampled[0].samples):
        out += [f"> {plain(sample.prompt)} …", ""]
        out += [f"- {plain(m.name)}: {plain(m.samples[i].text)}" for m in sampled if i < len(m.samples)]
        out.append("")
    return out


def _loaders(report: ReportData) -> list[str]:
    lines = [f"- {plain(model.name)}: {plain(each.sentence)}" for model in report.models for each in model.loaders]
    return ["## Programs that load it", "", *lines, ""] if lines else []


def _notes(report: ReportData) -> list[str]:
    lines = [f"- {plain(sentence)}" for sentence in report.warnings]
    lines += [f"- {plain(m.name)}: {plain(sentence)}" for m in report.models for sentence in m.warnings]
    lines += [f"- {plain(m.name)}: {plain(m.reload['sentence'])}" for m in report.models if m.reload]
    return ["## Notes", "", *lines, ""] if lines else []


def _recipes(report: ReportData) -> list[str]:
    out: list[str] = []
    for model in report.models:
        if model.recipe is not None:
            out += [f"## Recipe of {plain(model.name)}", "", "```json", json.dumps(model.recipe, indent=2), "```", ""]
    return out


def _origin(report: ReportData) -> list[str]:
    machine = report.machine
    lines = [
        f"- {plain(machine.processor)}, {machine.cores} cores, {bytes_(machine.memory_bytes)} of memory, {plain(machine.system)}"
    ]
    if machine.read_bytes_per_second and machine.operations_per_second:
        when = f"on {machine.measured_on} " if machine.measured_on else ""
        which = "it read" if machine.device == "cpu" else f"{plain(machine.device)} copied"
        lines.append(
            f"- {when}{which} {machine.read_bytes_per_second / 1e9:.1f} GB/s and multiplied {machine.operations_dtype} at"
            f" {machine.operations_per_second / 1e12:.2f} TFLOP/s"
        )
    lines += [f"- {name} {version}" for name, version in report.versions.items()]
    return ["## Measured on", "", *lines, ""]
