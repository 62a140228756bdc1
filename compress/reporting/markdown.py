"""A report as Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence

from ..results.report import ReportData
from ..results.result import Change, ModelResult, Speed
from ..results.wording import (
    bytes_,
    factor,
    interval,
    noise,
    number,
    p_value,
    percent_change,
    perplexity,
    seconds,
    share,
    speedup,
    times,
)

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
        _text,
        _tasks,
        _guarantees,
        _speed,
        _reasons,
        drafts_section,
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
    body = ["| " + " | ".join(plain(cell) for cell in row) + " |" for row in rows]
    if not body:
        return []
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return [f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|", *body, ""]


def plain(text: str) -> str:
    """External text, escaped so that none of it becomes Markdown or HTML."""
    for mark in "\\`*_[]<>|#~&":
        text = text.replace(mark, "\\" + mark)
    text = re.sub(r"(?i)\b(www)\.", r"\1\\.", text.replace("://", "\\://"))  # the hub links these automatically
    return " ".join(text.split())


def _name(model: ModelResult) -> str:
    return f"{model.name} (baseline)" if model.role == "baseline" else model.name


def _overview(report: ReportData) -> list[str]:
    """Only columns with measurements."""
    columns: list[tuple[str, list[str]]] = [
        ("model", [_name(m) for m in report.models]),
        ("stored as", [m.scheme for m in report.models]),
        ("size", [bytes_(m.size.bytes) if m.size else "" for m in report.models]),
        ("bits per weight", [f"{m.size.bits_per_weight:.2f}" if m.size else "" for m in report.models]),
        ("perplexity", [perplexity(m.text.perplexity) if m.text else "" for m in report.models]),
        ("decode, tokens/s", [number(m.speed.decode_rate.median) if m.speed else "" for m in report.models]),
        ("prompts, tokens/s", [number(m.speed.prefill_rate.median) if m.speed else "" for m in report.models]),
        (
            "decode",
            [speedup(m.against.decode.ratio) if m.against and m.against.decode else "" for m in report.models],
        ),
    ]
    kept = [(title, cells) for title, cells in columns if any(cells)]
    return table([title for title, _ in kept], zip(*(cells for _, cells in kept), strict=True), left=2)


def _text(report: ReportData) -> list[str]:
    read = [m for m in report.models if m.text is not None]
    if not read:
        return []
    rows = []
    for model in read:
        text, against = model.text, model.against
        assert text is not None
        change = against.perplexity or against.bits_per_byte if against else None
        beside = ""
        if change is not None:
            bounds = f", {interval(change.interval, percent_change)}" if change.interval else ""
            per = "" if against and against.perplexity else " per byte"
            beside = f"{percent_change(change.ratio)}{per}{bounds}{', ' + noise(change) if noise(change) else ''}"
        rows.append(
            [
                _name(model),
                perplexity(text.perplexity),
                interval(text.perplexity_interval, perplexity),
                f"{text.bits_per_byte:.4f}",
                beside,
                number(against.kl) if against and against.kl is not None else "",
                share(against.top1_agreement) if against and against.top1_agreement is not None else "",
            ]
        )
    first = read[0].text
    assert first is not None
    header = ["model", "perplexity", "95%", "bits per byte", "vs. baseline", "KL, nats", "top-1 agreement"]
    return [
        "## Text",
        "",
        f"{first.count} x {first.length} tokens of {plain(first.source)}; computed by {plain(first.computed_by)}.",
        "",
        *table(header, rows),
    ]


def _tasks(report: ReportData) -> list[str]:
    rows = []
    for model in report.models:
        changes = {(c.task, c.metric, c.filter): c for c in (model.against.tasks if model.against else [])}
        for task in model.tasks:
            change = changes.get((task.task, task.metric, task.filter))
            beside = flips = ""
            if change is not None:
                bounds = interval(change.interval, lambda v: f"{v:+.4f}")
                beside = ", ".join(filter(None, [f"{change.difference:+.4f}", bounds, noise(change)]))
                if change.gained is not None and change.p_value is not None:
                    flips = f"{change.gained} gained, {change.lost} lost, {p_value(change.p_value)}"
            rows.append(
                [
                    task.task,
                    task.metric + ("" if task.filter == "none" else f" ({task.filter})"),
                    _name(model),
                    f"{task.value:.4f}",
                    interval(task.interval, lambda v: f"{v:.4f}"),
                    task.count,
                    beside,
                    flips,
                ]
            )
    header = ["task", "metric", "model", "value", "95%", "items", "vs. baseline", "answers flipped"]
    found = table(header, sorted(rows, key=lambda row: (row[0], row[1])), left=3)
    return ["## Tasks", "", *found] if found else []


def _guarantees(report: ReportData) -> list[str]:
    found = [
        f"- {_name(model)}: {plain(each.sentence())}"
        for model in report.models
        for each in (model.against.guarantees if model.against else [])
    ]
    return ["## Guarantees", "", *found] if found else []


def _speed(report: ReportData) -> list[str]:
    measured = [(m, m.speed) for m in report.models if m.speed is not None]
    if not measured:
        return []
    first = measured[0][1]
    turns = "models taking turns" if first.interleaved else "one model after another"
    return [
        "## Speed",
        "",
        f"{first.prompt} tokens in, {first.generate} out; medians of {len(first.decode_rate.values)} rounds, {turns}.",
        "",
        *table(
            [
                "model",
                "first token",
                "prompts, tokens/s",
                "decode, tokens/s",
                "peak memory",
                "loading",
                "decode's limit",
                "prompts' limit",
            ],
            _rows_of_one_sequence(measured),
        ),
        *table(
            [
                "model",
                "at once",
                "tokens/s",
                "first token p50 / p99",
                "between tokens p50 / p99",
                "vs. baseline",
            ],
            _rows_of_loads(measured),
        ),
    ]


def _rows_of_one_sequence(measured: list[tuple[ModelResult, Speed]]) -> list[list[str]]:
    return [
        [
            _name(model),
            f"{seconds(s.first_token.median)}",
            _with_range(s, "prefill_rate"),
            _with_range(s, "decode_rate"),
            bytes_(s.peak_memory_bytes) if s.peak_memory_bytes else "",
            seconds(s.load_seconds) if s.load_seconds is not None else "",
            f"{share(s.decode_of_limit)} of {number(s.decode_limit)}" if s.decode_of_limit and s.decode_limit else "",
            f"{share(s.prefill_of_limit)} of {number(s.prefill_limit)}"
            if s.prefill_of_limit and s.prefill_limit
            else "",
        ]
        for model, s in measured
    ]


def _rows_of_loads(measured: list[tuple[ModelResult, Speed]]) -> list[list[str]]:
    return [
        [
            _name(model),
            str(load.concurrency),
            number(load.output_rate.median),
            f"{seconds(load.first_token_p50.median)} / {seconds(load.first_token_p99.median)}",
            f"{seconds(load.between_tokens_p50.median)} / {seconds(load.between_tokens_p99.median)}",
            _load_change(model, load.concurrency),
        ]
        for model, s in measured
        for load in s.loads
    ]


def _with_range(speed: Speed, what: str) -> str:
    found = getattr(speed, what)
    low, high = found.range
    return (
        f"{number(found.median)} ({number(low)} to {number(high)})" if len(found.values) > 1 else number(found.median)
    )


def _load_change(model: ModelResult, concurrency: int) -> str:
    change = model.against.loads.get(str(concurrency)) if model.against else None
    return "" if change is None else _speedup(change, times)


def _speedup(change: Change, say: Callable[[float], str]) -> str:
    return ", ".join(filter(None, [speedup(change.ratio), interval(change.interval, say), noise(change)]))


def _reasons(report: ReportData) -> list[str]:
    lines = [
        f"- {plain(model.name)}: {plain(sentence)}"
        for model in report.candidates
        if model.against
        for sentence in model.against.reasons
    ]
    return ["### Predicted and measured speed", "", *lines, ""] if lines else []


def drafts_section(report: ReportData) -> list[str]:
    """What speculative decoding gains each model, as lines."""
    out: list[str] = []
    for model in report.models:
        found = model.drafts
        if found is None:
            continue
        rows = [
            [
                str(load.concurrency),
                number(load.alone.median),
                number(load.drafted.median),
                _speedup(load.speedup, factor),
                "" if load.tokens_per_verification is None else f"{load.tokens_per_verification:.2f}",
                "" if load.accepted is None else share(load.accepted),
                ", ".join(share(each) for each in load.accepted_by_position),
                f"{load.same_answers} of {load.requests}",
            ]
            for load in found.loads
        ]
        header = ["at once", "tokens/s alone", "with drafts", "speedup", "tokens per verification"]
        header += ["accepted", "by position", "same answers"]
        out += [
            f"### {plain(_name(model))}, drafted by {plain(found.drafter)}",
            "",
            f"Prompts of {found.prompt} tokens of the text, {found.generate} out; {found.verdict}.",
            "",
            *table(header, rows, left=0),
        ]
    return ["## Speculative decoding", "", *out] if out else []


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
        out += [f"- {plain(_name(m))}: {plain(m.samples[i].text)}" for m in sampled if i < len(m.samples)]
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
        lines.append(
            f"- on {machine.measured_on} {'it read' if machine.device == 'cpu' else f'{plain(machine.device)} copied'} {machine.read_bytes_per_second / 1e9:.1f} GB/s and multiplied {machine.operations_dtype} at"
            f" {machine.operations_per_second / 1e12:.2f} TFLOP/s"
        )
    lines += [f"- {name} {version}" for name, version in report.versions.items()]
    return ["## Measured on", "", *lines, ""]
