"""The accuracy lost by compression: on text, and on tasks."""

from __future__ import annotations

from ...results import wording
from ...results.report import ReportData
from ...results.result import Change, TaskChange, TaskResult
from .models_table import named
from .table import Cell, Row, Table, table

_TEXT_HEADS = ["model", "perplexity", "change", "bits per byte", "change of bits", "KL, nats", "top-1 agreement"]
_GUARANTEE_HEADS = [
    "model", "claim", "of", "verdict", "items", "loss", "at least", "at most", "smallest", "more items needed",
]  # fmt: skip
_TASK_HEADS = ["model", "task", "metric", "value", "difference", "gained / lost", "McNemar"]


def accuracy_tables(report: ReportData) -> list[Table]:
    """The tables of text and tasks that were measured."""
    return [found for found in (_text(report), _tasks(report), _guarantees(report)) if found is not None]


def change_cell(change: Change | None) -> Cell | None:
    """A ratio as a change in percent, with its interval."""
    if change is None:
        return None
    bounds = wording.interval(change.interval, wording.percent_change)
    return Cell(wording.percent_change(change.ratio), change.ratio, notes=(bounds, wording.noise(change)))


def _text(report: ReportData) -> Table | None:
    rows: list[Row] = []
    readings = {}
    for i, model in enumerate(report.models):
        text, against = model.text, model.against
        if text is None:
            continue
        reading = f"{text.source}: {text.count} windows of {text.length} tokens, read by {text.computed_by}"
        readings.setdefault(reading, []).append(model.name)
        bounds = wording.interval(text.perplexity_interval, wording.perplexity)
        perplexity = Cell(wording.perplexity(text.perplexity), text.perplexity, notes=(bounds,))
        cells = [named(report, model), perplexity, None]
        cells += [Cell(wording.fixed(text.bits_per_byte, 4), text.bits_per_byte), None, None, None]
        if against is not None:
            cells[2], cells[4] = change_cell(against.perplexity), change_cell(against.bits_per_byte)
            if against.kl is not None:
                bounds = wording.interval(against.kl_interval, wording.number)
                cells[5] = Cell(wording.number(against.kl), against.kl, notes=(bounds,))
            if against.top1_agreement is not None:
                bounds = wording.interval(against.top1_interval, wording.share)
                cells[6] = Cell(wording.share(against.top1_agreement), against.top1_agreement, notes=(bounds,))
        rows.append((i, cells))
    said = "; ".join(
        reading if len(readings) == 1 else f"{reading} ({', '.join(models)})" for reading, models in readings.items()
    )
    note = f"{said}. With each value its 95% interval, where there is one."
    return table("Text", _TEXT_HEADS, rows, note=note)


def _tasks(report: ReportData) -> Table | None:
    keys = list(dict.fromkeys(_key(task) for model in report.models for task in model.tasks))
    rows: list[Row] = []
    shots: dict[str, str] = {}
    for key in keys:
        for i, model in enumerate(report.models):
            for task in (t for t in model.tasks if _key(t) == key):
                shots.setdefault(task.task, f"{task.task} {task.version}: {task.count} items, {task.fewshot} examples")
                changes = model.against.tasks if model.against is not None else []
                change = next((c for c in changes if _key(c) == key), None)
                rows.append((i, [named(report, model), *_task_cells(task), *_change_cells(change)]))
    note = f"{'; '.join(shots.values())}. With each value its 95% interval, where there is one."
    return table("Tasks", _TASK_HEADS, rows, words=["task", "metric"], note=note)


def _guarantees(report: ReportData) -> Table | None:
    rows: list[Row] = []
    for i, model in enumerate(report.models):
        for each in model.against.guarantees if model.against is not None else []:
            verdict = Cell(each.verdict, kind="plain" if each.verdict == "certified" else "worse")
            more = None if each.more_items is None else Cell(f"{each.more_items:,}", each.more_items)
            numbers = [
                Cell(each.say_signed(value), value) for value in (each.loss, each.at_least, each.at_most, each.smallest)
            ]
            items = Cell(f"{each.items:,}", each.items, notes=("" if each.of is None else f"of {each.of:,}",))
            rows.append((i, [named(report, model), Cell(each.claim), Cell(each.what), verdict, items, *numbers, more]))
    note = (
        "Losses beside the baseline over the same items. Bounds hold with the claim's confidence for all claims here together, whenever one looks; the"
        " smallest is what so many items could have certified, had none been lost."
    )
    return table("Guarantees", _GUARANTEE_HEADS, rows, words=["claim", "of", "verdict"], note=note)


def _task_cells(task: TaskResult) -> list[Cell]:
    better = "" if task.higher_is_better else "lower is better"
    through = "" if task.filter == "none" else f", {task.filter}"
    bounds = wording.interval(task.interval, wording.number)
    value = Cell(wording.number(task.value), task.value, notes=(bounds,))
    return [Cell(task.task), Cell(f"{task.metric}{through}", notes=(better,)), value]


def _change_cells(change: TaskChange | None) -> list[Cell | None]:
    if change is None:
        return [None, None, None]
    bounds = wording.interval(change.interval, wording.signed)
    cells: list[Cell | None] = [
        Cell(wording.signed(change.difference), change.difference, notes=(bounds, wording.noise(change))),
        None,
        None,
    ]
    if change.gained is not None and change.lost is not None:
        cells[1] = Cell(f"+{change.gained} / −{change.lost}", change.gained - change.lost)
    if change.p_value is not None:
        cells[2] = Cell(wording.p_value(change.p_value), change.p_value)
    return cells


def _key(task: TaskResult | TaskChange) -> tuple[str, str, str]:
    return task.task, task.metric, task.filter
