"""Models' measurements as a few lines on a terminal."""

from __future__ import annotations

from .result import Change, ModelResult
from .tasks import is_worse, primary_tasks
from .wording import (
    bytes_,
    factor,
    interval,
    noise,
    number,
    percent_change,
    perplexity,
    rate,
    share,
    shrinkage,
    signed,
    speedup,
)

_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


def alone(model: ModelResult) -> list[str]:
    """Measurements of a model without a baseline."""
    lines = [f"model:    {model.scheme}"]
    if model.size is not None:
        lines = [f"size:     {bytes_(model.size.bytes)}, {model.size.bits_per_weight:.2f} bits per weight"]
    if model.text is not None:
        lines.append(
            f"text:     perplexity {perplexity(model.text.perplexity)}, {model.text.bits_per_byte:.3f} bits per byte"
            f" ({model.text.count} x {model.text.length} tokens of {model.text.source}; {model.text.computed_by})"
        )
    for task, _ in primary_tasks(model):
        bounds = f" ({interval(task.interval, share)})" if task.interval else ""
        lines.append(f"task:     {task.task} {task.metric} {task.value:.4f}{bounds}, {task.count} items")
    if model.speed is not None:
        lines.append(
            f"speed:    decode {rate(model.speed.decode_rate.median)}, prompts {rate(model.speed.prefill_rate.median)}"
        )
    return lines


def beside(baseline: ModelResult, model: ModelResult, colour: bool) -> list[str]:
    """Measurements of a model, compared with the baseline."""
    return [
        *([] if model.size else [f"model:    {model.scheme}"]),
        *_size_lines(baseline, model),
        *_text_lines(baseline, model),
        *_task_lines(baseline, model, colour),
        *_speed_lines(baseline, model, colour),
    ]


def _size_lines(baseline: ModelResult, model: ModelResult) -> list[str]:
    assert model.against is not None
    if model.against.size is None or model.size is None or baseline.size is None:
        return []
    memory = ""
    if baseline.speed and model.speed and baseline.speed.peak_memory_bytes and model.speed.peak_memory_bytes:
        peaks = [bytes_(each.speed.peak_memory_bytes or 0) for each in (baseline, model) if each.speed]
        memory = f"; peak memory {' -> '.join(peaks)}"
    return [
        f"size:     {bytes_(baseline.size.bytes)} -> {bytes_(model.size.bytes)}"
        f" ({shrinkage(model.against.size.ratio)}; {model.size.bits_per_weight:.2f} bits per weight{memory})"
    ]


def _text_lines(baseline: ModelResult, model: ModelResult) -> list[str]:
    against = model.against
    assert against is not None
    if model.text is None or baseline.text is None:
        return []
    if against.perplexity is not None:
        change = against.perplexity
        bounds = f", 95% {interval(change.interval, percent_change)}" if change.interval else ""
        kl = (
            f"; KL {against.kl:.4f}, top-1 agreement {share(against.top1_agreement or 0)}"
            if against.kl is not None
            else ""
        )
        return [
            f"text:     perplexity {perplexity(baseline.text.perplexity)} -> {perplexity(model.text.perplexity)}"
            f" ({percent_change(change.ratio)}{bounds}{_comma(noise(change))}{kl}; {model.text.computed_by})"
        ]
    if against.bits_per_byte is not None:
        return [
            f"text:     bits per byte {baseline.text.bits_per_byte:.3f} -> {model.text.bits_per_byte:.3f}"
            f" ({percent_change(against.bits_per_byte.ratio)}{_comma(noise(against.bits_per_byte))})"
        ]
    return []


def _task_lines(baseline: ModelResult, model: ModelResult, colour: bool) -> list[str]:
    theirs = {(task.task, task.metric, task.filter): task.value for task in baseline.tasks}
    lines = []
    for task, change in primary_tasks(model):
        if change is None:
            lines.append(
                f"task:     {task.task} {task.metric} {task.value:.4f} (not comparable: the baseline has no such items)"
            )
            continue
        flips = f"{change.gained} gained, {change.lost} lost" if change.gained is not None else ""
        notes = ", ".join(filter(None, [signed(change.difference), noise(change), flips]))
        before = theirs[task.task, task.metric, task.filter]
        line = f"task:     {task.task} {task.metric} {before:.4f} -> {task.value:.4f} ({notes})"
        lines.append(f"{_RED}{line}{_PLAIN}" if is_worse(task, change) and colour else line)
    return lines


def _speed_lines(baseline: ModelResult, model: ModelResult, colour: bool) -> list[str]:
    against = model.against
    assert against is not None
    if model.speed is None or baseline.speed is None or against.decode is None:
        return []
    parts = [
        f"{what} {number(theirs.median)} -> {rate(mine.median)} ({speedup(change.ratio)}{_bounds(change)})"
        for what, change, mine, theirs in (
            ("decode", against.decode, model.speed.decode_rate, baseline.speed.decode_rate),
            ("prompts", against.prefill, model.speed.prefill_rate, baseline.speed.prefill_rate),
        )
        if change is not None
    ]
    slower = any(
        c is not None and c.ratio < 1 and c.significant is not False for c in (against.decode, against.prefill)
    )
    line = f"speed:    {'; '.join(parts)}"
    lines = [f"{_RED}{line}{_PLAIN}" if slower and colour else line]
    if against.decode.ratio < 1 or (against.prefill is not None and against.prefill.ratio < 1):
        lines += [f"reason:   {sentence}" for sentence in against.reasons]
    return lines


def drafts(model: ModelResult) -> list[str]:
    """What speculative decoding gains it."""
    found = model.drafts
    if found is None:
        return []
    loads = []
    for load in found.loads:
        notes = [interval(load.speedup.interval, factor), noise(load.speedup)]
        if load.tokens_per_verification is not None and load.accepted is not None:
            notes.append(f"{load.tokens_per_verification:.2f} tokens per verification, {share(load.accepted)} accepted")
        elif load.tokens_per_verification is None:
            notes.append("nothing was drafted")
        if load.same_answers < load.requests:
            notes.append(f"{load.requests - load.same_answers} of {load.requests} answers differ")
        loads.append(f"{load.concurrency} at once {speedup(load.speedup.ratio)} ({', '.join(filter(None, notes))})")
    return [f"drafts:   {model.name} with {found.drafter} drafting: {'; '.join(loads)}", f"          {found.verdict}"]


def _bounds(change: Change) -> str:
    if change.interval is None:
        return ""
    return f", 95% {interval(change.interval, factor)}{_comma(noise(change))}"


def _comma(text: str) -> str:
    return f", {text}" if text else ""
