"""Speed of the models for one request and several concurrent ones, and the kernels used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ...results.result import Change, Speed, Spread
from .models_table import named
from .table import Cell, Row, Table, table

_ALONE = ["model", "first token", "prefill, tokens/s", "of limit", "decode, tokens/s", "of its limit"]
_ALONE += ["peak memory", "load time"]
_LOADED = ["model", "in flight", "total tokens/s", "vs. baseline", "first token p50", "first token p99"]
_LOADED += ["between tokens p50", "between tokens p99"]
_DRAFTED = ["model", "drafter", "in flight", "tokens/s alone", "with drafts", "speedup", "tokens per verification"]
_DRAFTED += ["accepted", "same answers"]


@dataclass(frozen=True)
class Kernels:
    """The kernel of each linear of some models, by their names."""

    models: list[str]
    table: Table


@dataclass(frozen=True)
class Speeds:
    """Contents of the section on speed."""

    tables: list[Table]
    kernels: list[Kernels]


def speeds(report: ReportData) -> Speeds | None:
    """Speed of the models, and the kernels used; None if nothing was measured."""
    found = Speeds(speed_tables(report), _kernel_tables(report))
    return found if found.tables or found.kernels else None


def speed_tables(report: ReportData) -> list[Table]:
    """A single request, then each load; only what was measured."""
    alone: list[Row] = []
    loaded: list[Row] = []
    for i, model in enumerate(report.models):
        if (speed := model.speed) is None:
            continue
        against = model.against
        prefill, decode = (against.prefill, against.decode) if against is not None else (None, None)
        memory, loading = speed.peak_memory_bytes, speed.load_seconds
        alone.append(
            (
                i,
                [
                    named(report, model),
                    _measured(speed.first_token, wording.seconds),
                    _measured(speed.prefill_rate, wording.number, prefill),
                    _part(speed.prefill_of_limit, speed.prefill_limit),
                    _measured(speed.decode_rate, wording.number, decode),
                    _part(speed.decode_of_limit, speed.decode_limit),
                    None if memory is None else Cell(wording.bytes_(memory), memory),
                    None if loading is None else Cell(wording.seconds(loading), loading),
                ],
            )
        )
        for load in speed.loads:
            change = against.loads.get(str(load.concurrency)) if against is not None else None
            cells = [
                named(report, model),
                Cell(str(load.concurrency), load.concurrency),
                _measured(load.output_rate, wording.number),
                None if change is None else _change(change),
                *(
                    _measured(spread, wording.seconds)
                    for spread in (
                        load.first_token_p50,
                        load.first_token_p99,
                        load.between_tokens_p50,
                        load.between_tokens_p99,
                    )
                ),
            ]
            loaded.append((i, cells))
    found = [
        table("Single request", _ALONE, alone, note=_shape(report)),
        table("Concurrent requests", _LOADED, loaded),
        draft_table(report),
    ]
    return [each for each in found if each is not None]


def draft_table(report: ReportData) -> Table | None:
    """What speculative decoding gains, by load."""
    rows: list[Row] = []
    said: dict[str, None] = {}
    for i, model in enumerate(report.models):
        found = model.drafts
        if found is None:
            continue
        shape = f"prompts of {found.prompt} tokens of the text, {found.generate} generated"
        said[f"{model.name}, drafted by {found.drafter}, {shape}: {found.verdict}."] = None
        for load in found.loads:
            tokens, accepted = load.tokens_per_verification, load.accepted
            positions = ", ".join(wording.share(each) for each in load.accepted_by_position)
            rows.append(
                (
                    i,
                    [
                        named(report, model),
                        Cell(found.drafter, kind="name"),
                        Cell(str(load.concurrency), load.concurrency),
                        _measured(load.alone, wording.number),
                        _measured(load.drafted, wording.number),
                        _change(load.speedup),
                        None if tokens is None else Cell(wording.fixed(tokens, 2), tokens),
                        None if accepted is None else Cell(wording.share(accepted), accepted, notes=(positions,)),
                        Cell(f"{load.same_answers} of {load.requests}", load.same_answers / load.requests),
                    ],
                )
            )
    note = "With and without drafts in turns. With the accepted share that of each position in a draft."
    return table("Speculative decoding", _DRAFTED, rows, words=["drafter"], note=" ".join([note, *said]))


def _kernel_tables(report: ReportData) -> list[Kernels]:
    """The kernel of each linear, by model; models that agree share a line."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for model in report.models:
        if model.speed is not None and model.speed.kernels:
            groups.setdefault(tuple(model.speed.kernels.items()), []).append(model.name)
    out = []
    for kernels, models in groups.items():
        rows: list[Row] = [(None, [Cell(role), Cell(kernel)]) for role, kernel in kernels]
        shown = table("Kernel of each linear", ["linear", "kernel"], rows, words=["kernel"])
        assert shown is not None
        out.append(Kernels(models, shown))
    return out


def _shape(report: ReportData) -> str:
    speeds: list[Speed] = [m.speed for m in report.models if m.speed is not None]
    if not speeds:
        return ""
    shapes = {f"prompts of {s.prompt} tokens, {s.generate} generated" for s in speeds}
    turns = (
        "The models took turns, and a speedup is the median of turns beside the baseline's, not the ratio of both medians."
        if all(s.interleaved for s in speeds) and len(speeds) > 1
        else ""
    )
    ranges = any(len(s.decode_rate.values) > 1 for s in speeds)
    said = f"{'; '.join(sorted(shapes)).capitalize()}. {turns}"
    if ranges:
        said += " Medians; with them the smallest and largest repeat."
    if any(s.decode_limit is not None for s in speeds):
        said += " The limit of decoding is reading the weights from memory."
    if any(s.prefill_limit is not None for s in speeds):
        said += " The limit of prefill is the machine's matrix-product rate, which integer products may exceed."
    return said


def _measured(spread: Spread, say: Callable[[float], str], change: Change | None = None) -> Cell:
    beside_baseline = "" if change is None else _change(change)
    return Cell(say(spread.median), spread.median, notes=(wording.spread(spread, say), beside_baseline))


def _change(change: Change) -> Cell:
    text = wording.speedup(change.ratio)
    kind = "worse" if text.endswith("slower") else "plain"
    return Cell(
        text, change.ratio, notes=(wording.interval(change.interval, wording.factor), wording.noise(change)), kind=kind
    )


def _part(part: float | None, limit: float | None) -> Cell | None:
    if part is None:
        return None
    return Cell(wording.share(part), part, notes=("" if limit is None else f"of {wording.number(limit)}",))
