"""The headline figures of each candidate, at the top of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ...results.result import Against, Change, ModelResult
from ...results.tasks import primary_tasks
from ..tables.table import Cell, Row, Table, table

_MOST_IN_ROWS = 4


@dataclass(frozen=True)
class Figure:
    """One headline figure.

    Attributes:
        label: its name.
        text: the figure in words.
        notes: its interval, and whether it is within noise.
        sort: the number behind it.
        worse: whether it is a slowdown.
    """

    label: str
    text: str
    notes: tuple[str, ...]
    sort: float
    worse: bool = False


@dataclass(frozen=True)
class FigureRow:
    """One candidate's figures.

    Attributes:
        model: its position in the report.
        name, scheme: its own.
        figures: shown side by side.
        why: the reasons for its speed.
        slow: whether anything runs slower than on the baseline.
    """

    model: int
    name: str
    scheme: str
    figures: list[Figure]
    why: list[str]
    slow: bool


@dataclass(frozen=True)
class Headline:
    """Few candidates have a row each; many have a table, with the reasons for their speeds below it."""

    rows: list[FigureRow]
    table: Table | None = None
    explained: Sequence[str] = ()


def headline(report: ReportData) -> Headline:
    """Each candidate's figures in a separate row, or one table if there are many candidates."""
    rows = [(i, model, figures(model)) for i, model in enumerate(report.models)]
    rows = [(i, model, found) for i, model, found in rows if found]
    if len(rows) > _MOST_IN_ROWS:
        return _as_table(rows)
    return Headline([_row(i, model, found) for i, model, found in rows])


def figures(model: ModelResult) -> list[Figure]:
    """A candidate's figures relative to the baseline; for a single model, its own values."""
    if model.role == "baseline":
        return []
    return _alone(model) if model.against is None else _against(model, model.against)


def slow(against: Against) -> bool:
    """Whether anything runs slower than on the baseline."""
    changes = [against.decode, against.prefill, *against.loads.values()]
    return any(_slower(c) for c in changes if c is not None)


def why(against: Against) -> list[str]:
    """The reasons for the speed, or at least the prediction from reading fewer bytes."""
    slower = against.decode is not None and _slower(against.decode)
    if against.reasons or against.predicted_decode is None or not slower:
        return list(against.reasons)
    return [f"From its bytes alone, decoding would be {wording.speedup(against.predicted_decode)}."]


def _against(model: ModelResult, against: Against) -> list[Figure]:
    found = []
    for label, change in (("decode", against.decode), ("prefill", against.prefill)):
        if change is not None:
            text = wording.speedup(change.ratio)
            found.append(_figure(label, change, text, wording.interval(change.interval, wording.factor)))
    for label, change in (("checkpoint", against.size), ("peak memory", against.memory)):
        if change is not None:
            found.append(_figure(label, change, wording.shrinkage(change.ratio), ""))
    quality = ("perplexity", against.perplexity) if against.perplexity else ("bits per byte", against.bits_per_byte)
    if quality[1] is not None:
        bounds = wording.interval(quality[1].interval, wording.percent_change)
        found.append(_figure(quality[0], quality[1], wording.percent_change(quality[1].ratio), bounds))
    else:
        changes = [change for _, change in primary_tasks(model) if change is not None]
        for task in changes[:2]:
            notes = (wording.interval(task.interval, wording.signed), wording.noise(task))
            found.append(Figure(f"{task.task}, {task.metric}", wording.signed(task.difference), notes, task.difference))
    if against.top1_agreement is not None:
        notes = (wording.interval(against.top1_interval, wording.share),)
        text = wording.share(against.top1_agreement)
        found.append(Figure("top-1 agreement", text, notes, against.top1_agreement))
    return found


def _alone(model: ModelResult) -> list[Figure]:
    found: list[Figure] = []
    if (size := model.size) is not None:
        bits = f"{wording.number(size.bits_per_weight)} bits per weight"
        found.append(Figure("checkpoint", wording.bytes_(size.bytes), (bits,), size.bytes))
    if model.text is not None:
        bounds = wording.interval(model.text.perplexity_interval, wording.perplexity)
        text = wording.perplexity(model.text.perplexity)
        found.append(Figure("perplexity", text, (bounds,), model.text.perplexity))
    if model.speed is not None:
        for label, measured in (("decode", model.speed.decode_rate), ("prefill", model.speed.prefill_rate)):
            bounds = wording.spread(measured, wording.number)
            found.append(Figure(label, wording.rate(measured.median), (bounds,), measured.median))
    return found


def _figure(label: str, change: Change, text: str, bounds: str) -> Figure:
    return Figure(label, text, (bounds, wording.noise(change)), change.ratio, text.endswith("slower"))


def _row(i: int, model: ModelResult, found: list[Figure]) -> FigureRow:
    reasons, is_slow = (why(model.against), slow(model.against)) if model.against is not None else ([], False)
    return FigureRow(i, model.name, model.scheme, found, reasons, is_slow)


def _as_table(rows: list[tuple[int, ModelResult, list[Figure]]]) -> Headline:
    labels = list(dict.fromkeys(f.label for _, _, found in rows for f in found))
    out: list[Row] = []
    for i, model, found in rows:
        by_label = {f.label: f for f in found}
        cells: list[Cell | None] = [Cell(model.name, kind="name")]
        for label in labels:
            f = by_label.get(label)
            cells.append(None if f is None else Cell(f.text, f.sort, f.notes, "worse" if f.worse else "plain"))
        reasons = why(model.against) if model.against is not None and slow(model.against) else []
        cells.append(Cell("", items=reasons) if reasons else None)
        out.append((i, cells))
    explained = [f"{model.name}: {reason}" for _, model, _ in rows if model.against for reason in why(model.against)]
    shown = table("Candidates vs. the baseline", ["model", *labels, "why"], out, words=["why"])
    return Headline([], shown, explained)


def _slower(change: Change) -> bool:
    return wording.speedup(change.ratio).endswith("slower")
