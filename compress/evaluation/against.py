"""A model's measurements compared with the baseline's: how much they differ, and whether by more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..results.reasons import reasons
from ..results.result import Against, Change, Machine, ModelResult, Speed, Spread, TaskChange, TaskResult, Text
from ..results.statistics import (
    Interval,
    excludes,
    exp,
    mean_interval,
    median_interval,
    paired_interval,
    resampled_interval,
    sign_test,
)
from ..results.tasks import primary_tasks
from .scoring.aggregations import Aggregate, aggregation, is_right_or_wrong

if TYPE_CHECKING:
    from .scoring.text import Divergence  # imports torch, which comparing two reports does not need

# If two models with different tokenizers read texts of sizes this close, it is the same text.
_AS_MUCH = 0.1


def against(
    baseline: ModelResult, model: ModelResult, machine: Machine, divergence: Divergence | None = None
) -> Against:
    """Compare what both models have.

    Args:
        baseline, model: their measurements.
        machine: where speed was measured.
        divergence: of the next-token distributions, if both models were available.
    """
    fields: dict[str, Any] = divergence.as_fields() if divergence else {}
    if baseline.text and model.text:
        fields |= _text_changes(baseline.text, model.text)
    if baseline.speed and model.speed and _same_load(baseline.speed, model.speed):
        changes = _speed_changes(baseline.speed, model.speed)
        decode, prefill = changes["decode"].ratio, changes["prefill"].ratio
        fields |= changes
        fields["reasons"] = reasons(baseline.speed, model.speed, machine, decode=decode, prefill=prefill)
    return Against(
        **fields,
        tasks=[
            change
            for mine in model.tasks
            for theirs in baseline.tasks
            if (change := _task_change(theirs, mine)) is not None
        ],
        size=Change(ratio=model.size.bytes / baseline.size.bytes) if model.size and baseline.size else None,
    )


def incomparable(baseline: ModelResult, model: ModelResult, beside: Against) -> list[str]:
    """Sentences on what both have but cannot be compared."""
    model = model.model_copy(update={"against": beside})
    found = []
    if baseline.text and model.text and beside.perplexity is None and beside.bits_per_byte is None:
        found.append(
            f"{model.name} and {baseline.name} read different text ({_read(model.text)}; {_read(baseline.text)}), so neither"
            " perplexity nor bits per byte is compared"
        )
    if baseline.speed and model.speed and beside.decode is None:
        found.append(
            f"{model.name} and {baseline.name} were timed differently ({_load(model.speed)}; {_load(baseline.speed)}), so speeds are not compared"
        )
    theirs = {(each.task, each.metric, each.filter): each for each in baseline.tasks}
    for result, change in primary_tasks(model, with_members=True):
        before = theirs.get((result.task, result.metric, result.filter))
        if before is not None and change is None and not before.answers_the_same(result):
            found.append(
                f"{result.task} is not compared: {model.name} answered {_answered(result)}, and {baseline.name} {_answered(before)}"
                f"{', or others of the same number, or the task was edited' if _answered(before) == _answered(result) else ''}"
            )
    return found


def _answered(result: TaskResult) -> str:
    shots = f" with {result.fewshot} examples" if result.fewshot else ""
    return f"{result.count} items{shots} of version {result.version}"


def _load(speed: Speed) -> str:
    processes = f" on {speed.ranks} processes" if speed.ranks > 1 else ""
    return f"{speed.prompt} tokens in and {speed.generate} out{processes}"


def _read(text: Text) -> str:
    return f"{text.windows} x {text.length} tokens of {text.source}"


def _text_changes(baseline: Text, model: Text) -> dict[str, Any]:
    if baseline.text_sha256 == model.text_sha256:
        paired = [b - a for a, b in zip(baseline.nll, model.nll, strict=True)]
        each = mean_interval([difference / (model.length - 1) for difference in paired])
        ratio = exp(math.fsum(paired) / (model.windows * (model.length - 1)))
        interval = None if each is None else (exp(each[0]), exp(each[1]))
        return {
            "perplexity": _change(ratio, interval),
            # Of the same bytes, however each report has counted them.
            "bits_per_byte": _change(
                math.fsum(model.nll) / math.fsum(baseline.nll), _bits_interval(baseline, model, True)
            ),
        }
    covered = sum(model.bytes) / max(1, sum(baseline.bytes))
    if (baseline.source_sha256, baseline.length) != (model.source_sha256, model.length) or abs(covered - 1) > _AS_MUCH:
        return {}
    same_tokenizer = all(a == b for a, b in zip(baseline.bytes, model.bytes, strict=False))
    if same_tokenizer or baseline.of is not None or model.of is not None:
        return {}  # one read on, or other parts: what it read there may be harder by more than what was lost
    interval = _bits_interval(baseline, model, False)
    return {"bits_per_byte": _change(model.bits_per_byte / baseline.bits_per_byte, interval)}


def _bits_interval(baseline: Text, model: Text, paired: bool) -> Interval | None:
    """Of the ratio of bits per byte, by the spread of windows, on the scale of logarithms."""
    if min(baseline.windows, model.windows) < 2:
        return None
    if paired:
        places = list(zip(baseline.nll, model.nll, strict=True))
        return resampled_interval(places, lambda part: math.fsum(b for _, b in part) / math.fsum(a for a, _ in part))
    variance = 0.0
    for text in (baseline, model):
        rates = [nll / max(1, size) for nll, size in zip(text.nll, text.bytes, strict=True)]
        interval = mean_interval(rates)
        assert interval is not None
        middle = math.fsum(rates) / len(rates)
        variance += ((interval[1] - interval[0]) / 2 / middle) ** 2
    middle = math.log(model.bits_per_byte / baseline.bits_per_byte)
    return exp(middle - math.sqrt(variance)), exp(middle + math.sqrt(variance))


def _task_change(baseline: TaskResult, model: TaskResult) -> TaskChange | None:
    if not baseline.answers_the_same(model):
        return None
    fields: dict[str, Any] = {"difference": model.value - baseline.value}
    pairs = list(zip(baseline.by_item, model.by_item, strict=True))
    aggregate = aggregation(model.aggregation)
    if model.aggregation == "mean" and is_right_or_wrong([*baseline.by_item, *model.by_item]):
        gained = sum(b > a for a, b in pairs)
        lost = sum(a > b for a, b in pairs)
        p = sign_test(gained, lost)
        fields |= {
            "gained": gained,
            "lost": lost,
            "p_value": p,
            "interval": paired_interval(gained, lost, len(pairs)),
            "significant": p < 0.05,
        }
    elif aggregate is not None and pairs:
        interval = resampled_interval(pairs, lambda part: _difference(part, aggregate))
        fields |= {"interval": interval, "significant": excludes(interval, 0)}
    return TaskChange(task=model.task, metric=model.metric, filter=model.filter, **fields)


def _difference(pairs: Sequence[tuple[Any, Any]], aggregate: Aggregate) -> float:
    return aggregate([b for _, b in pairs]) - aggregate([a for a, _ in pairs])


def _same_load(baseline: Speed, model: Speed) -> bool:
    return (baseline.prompt, baseline.generate, baseline.ranks) == (model.prompt, model.generate, model.ranks)


def _speed_changes(baseline: Speed, model: Speed) -> dict[str, Any]:
    paired = baseline.interleaved and model.interleaved
    fields: dict[str, Any] = {
        "prefill": spread_change(baseline.prefill_rate, model.prefill_rate, paired),
        "decode": spread_change(baseline.decode_rate, model.decode_rate, paired),
        "loads": {
            str(mine.concurrency): spread_change(theirs.output_rate, mine.output_rate, paired)
            for mine in model.loads
            for theirs in baseline.loads
            if mine.concurrency == theirs.concurrency
        },
    }
    if baseline.decode_bytes_per_token and model.decode_bytes_per_token:
        fields["predicted_decode"] = baseline.decode_bytes_per_token / model.decode_bytes_per_token
    if baseline.peak_memory_bytes and model.peak_memory_bytes:
        fields["memory"] = Change(ratio=model.peak_memory_bytes / baseline.peak_memory_bytes)
    return fields


def spread_change(baseline: Spread, model: Spread, paired: bool) -> Change:
    """The ratio of two measured quantities.

    Args:
        baseline, model: the quantities.
        paired: whether both were measured in turns.
    """
    if not paired or len(baseline.values) != len(model.values):
        return Change(ratio=model.median / baseline.median)
    rounds = [mine / theirs for theirs, mine in zip(baseline.values, model.values, strict=True)]
    return _change(statistics.median(rounds), median_interval(rounds))


def _change(ratio: float, interval: Interval | None) -> Change:
    return Change(ratio=ratio, interval=interval, significant=excludes(interval, 1.0))
