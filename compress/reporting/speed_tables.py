"""How fast the models run, alone and with several requests in flight, and what computes them."""

from __future__ import annotations

from collections.abc import Callable

from ..results.result import Change, Speed, Spread
from . import wording
from .accuracy_tables import named
from .markup import Cell, Row, beside, esc, fold, name, table
from .report import ReportData

_ALONE = ["model", "first token", "prefill, tokens/s", "of limit", "decode, tokens/s", "of its limit"]
_ALONE += ["peak memory", "load time"]
_LOADED = ["model", "in flight", "tokens/s, all together", "beside the baseline", "first token p50", "first token p99"]
_LOADED += ["between tokens p50", "between tokens p99"]


def speed_tables(report: ReportData) -> str:
    """One request alone, then each load; nothing of what was not measured."""
    alone: list[Row] = []
    loaded: list[Row] = []
    for i, model in enumerate(report.models):
        if (speed := model.speed) is None:
            continue
        against = model.against
        prefill, decode = (against.prefill, against.decode) if against is not None else (None, None)
        memory = speed.peak_memory_bytes
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
                    Cell(wording.seconds(speed.load_seconds), speed.load_seconds),
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
    return table("One request alone", _ALONE, alone, note=_shape(report)) + table(
        "Several requests in flight", _LOADED, loaded
    )


def kernel_tables(report: ReportData) -> str:
    """What computes each linear, by model; models that agree are told once."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for model in report.models:
        if model.speed is not None and model.speed.kernels:
            groups.setdefault(tuple(model.speed.kernels.items()), []).append(model.name)
    out = []
    for kernels, models in groups.items():
        rows: list[Row] = [(None, [Cell(esc(role)), Cell(esc(kernel))]) for role, kernel in kernels]
        summary = ", ".join(name(m) for m in models)
        out.append(fold(summary, table("What computes each linear", ["linear", "kernel"], rows, words=["kernel"])))
    return f'<h3 class="quiet">What computes each linear</h3>{"".join(out)}' if out else ""


def _shape(report: ReportData) -> str:
    speeds: list[Speed] = [m.speed for m in report.models if m.speed is not None]
    if not speeds:
        return ""
    shapes = {f"prompts of {s.prompt} tokens, {s.generate} generated" for s in speeds}
    turns = "The models took turns." if all(s.interleaved for s in speeds) and len(speeds) > 1 else ""
    ranges = any(len(s.decode_rate.values) > 1 for s in speeds)
    said = f"{'; '.join(sorted(shapes)).capitalize()}. {turns}"
    if ranges:
        said += " Medians; under them the smallest and the largest of the repeats."
    if any(s.decode_limit is not None for s in speeds):
        said += " The limit of decoding is reading the weights from memory."
    if any(s.prefill_limit is not None for s in speeds):
        said += " That of prefill is the machine's rate of matrix products, which integers may exceed."
    return said


def _measured(spread: Spread, say: Callable[[float], str], change: Change | None = None) -> Cell:
    beside_baseline = "" if change is None else _change(change).html
    return Cell(beside(say(spread.median), wording.spread(spread, say), beside_baseline), spread.median)


def _change(change: Change) -> Cell:
    text = wording.speedup(change.ratio)
    said = f'<span class="worse">{text}</span>' if text.endswith("slower") else text
    return Cell(beside(said, wording.noise(change)), change.ratio)


def _part(part: float | None, limit: float | None) -> Cell | None:
    if part is None:
        return None
    return Cell(beside(wording.share(part), "" if limit is None else f"of {wording.number(limit)}"), part)
