"""Every number of a report in one long table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ...results.result import Against, Change, Interval, ModelResult, Spread
from ..tables.table import Cell, Row, Table, table


@dataclass(frozen=True)
class Number:
    """One measured number, and its ratio to the baseline's."""

    metric: str
    value: float
    unit: str
    bounds: Interval | None = None
    change: Change | None = None


def every_number(report: ReportData) -> Table | None:
    """One row for each model and metric."""
    rows: list[Row] = []
    for i, model in enumerate(report.models):
        for n in numbers(model):
            low, high = (Cell(wording.exact(b), b) for b in n.bounds) if n.bounds else (None, None)
            cells = [Cell(n.metric), Cell(model.name, kind="name"), Cell(wording.exact(n.value), n.value), low, high]
            cells += [Cell(n.unit) if n.unit else None, _compared(n.change)]
            rows.append((i, cells))
    heads = ["metric", "model", "value", "low", "high", "unit", "vs. baseline"]
    note = "Low and high are the 95% interval for accuracy, and the smallest and the largest repeat for speed."
    return table("Every number", heads, rows, words=["model", "unit"], note=note)


def numbers(model: ModelResult) -> Iterator[Number]:
    """All measurements of a model, in the order of the report."""
    against = model.against or Against()
    if model.size is not None:
        yield Number("checkpoint", model.size.bytes, "bytes", None, against.size)
        yield Number("parameters", model.size.parameters, "")
        yield Number("bits per weight", model.size.bits_per_weight, "bits")
        if model.size.linear_bits_per_weight is not None:
            yield Number("bits per weight of quantized linears", model.size.linear_bits_per_weight, "bits")
    if model.text is not None:
        bounds = model.text.perplexity_interval
        yield Number("perplexity", model.text.perplexity, "", bounds, against.perplexity)
        yield Number("bits per byte", model.text.bits_per_byte, "bits", None, against.bits_per_byte)
    if against.kl is not None:
        yield Number("KL from the baseline", against.kl, "nats", against.kl_interval)
    if against.top1_agreement is not None:
        yield Number("top-1 agreement with the baseline", against.top1_agreement, "", against.top1_interval)
    for task in model.tasks:
        through = "" if task.filter == "none" else f", {task.filter}"
        yield Number(f"{task.task}, {task.metric}{through}", task.value, "", task.interval)
    for change in against.tasks:
        through = "" if change.filter == "none" else f", {change.filter}"
        metric = f"{change.task}, {change.metric}{through}: difference"
        yield Number(metric, change.difference, "", change.interval)
    yield from _speed(model, against)
    for load in model.drafts.loads if model.drafts is not None else []:
        at = f"{load.concurrency} in flight, drafted: "
        yield Number(f"{at}speedup", load.speedup.ratio, "×", load.speedup.interval)
        if load.accepted is not None:
            yield Number(f"{at}accepted", load.accepted, "")
        if load.tokens_per_verification is not None:
            yield Number(f"{at}tokens per verification", load.tokens_per_verification, "")


def _speed(model: ModelResult, against: Against) -> Iterator[Number]:
    speed = model.speed
    if speed is None:
        return
    yield _repeated("first token", speed.first_token, "s")
    yield _repeated("prefill", speed.prefill_rate, "tokens/s", against.prefill)
    yield _repeated("decode", speed.decode_rate, "tokens/s", against.decode)
    limits = (
        ("limit of decoding", speed.decode_limit, "tokens/s"),
        ("decode, share of its limit", speed.decode_of_limit, ""),
        ("limit of prefill", speed.prefill_limit, "tokens/s"),
        ("prefill, share of its limit", speed.prefill_of_limit, ""),
        ("predicted decode speedup", against.predicted_decode, "×"),
    )
    for metric, value, unit in limits:
        if value is not None:
            yield Number(metric, value, unit)
    if speed.decode_bytes_per_token is not None:
        yield Number("weights read per token", speed.decode_bytes_per_token, "bytes")
    if speed.peak_memory_bytes is not None:
        yield Number("peak memory", speed.peak_memory_bytes, "bytes", None, against.memory)
    if speed.load_seconds is not None:
        yield Number("loading", speed.load_seconds, "s")
    for load in speed.loads:
        at = f"{load.concurrency} in flight: "
        yield _repeated(f"{at}throughput", load.output_rate, "tokens/s", against.loads.get(str(load.concurrency)))
        yield _repeated(f"{at}first token p50", load.first_token_p50, "s")
        yield _repeated(f"{at}first token p99", load.first_token_p99, "s")
        yield _repeated(f"{at}between tokens p50", load.between_tokens_p50, "s")
        yield _repeated(f"{at}between tokens p99", load.between_tokens_p99, "s")
    for kind, parts in (("decoding a token", speed.decode_time), ("a prompt", speed.prefill_time)):
        for part in parts:
            yield Number(f"time of {kind}: {part.name}", part.seconds, "s")


def _repeated(metric: str, spread: Spread, unit: str, change: Change | None = None) -> Number:
    return Number(metric, spread.median, unit, spread.range if len(spread.values) > 1 else None, change)


def _compared(change: Change | None) -> Cell | None:
    if change is None:
        return None
    bounds = wording.interval(change.interval, lambda ratio: f"{wording.fixed(ratio, 3)}×")
    return Cell(f"{wording.number(change.ratio)}×", change.ratio, notes=(bounds, wording.noise(change)))
