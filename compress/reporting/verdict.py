"""Whether compression paid off, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from ..results.report import ReportData
from ..results.result import Against, Change, ModelResult
from ..results.tasks import is_worse, primary_tasks
from ..results.wording import bytes_, noise, percent_change, perplexity, rate, shrinkage, signed, speedup
from .plot.measures import accuracy, cost
from .plot.pareto import drawn_models, front

_NAMED = 3


def verdict(report: ReportData) -> str:
    """The sentence at the top of a report, derived from the rest of it."""
    models, candidates = report.models, report.candidates
    compared = [(model, model.against) for model in candidates if model.against is not None]
    if not compared:
        return "; ".join(_alone(model, len(models) > 1) for model in candidates or models)
    if len(compared) == 1:
        return _beside(*compared[0])
    if len(compared) <= _NAMED:
        return "; ".join(f"{model.name}: {_beside(model, against)}" for model, against in compared)
    best = _on_front(report)
    named = [(model, against) for model, against in compared if model.name in best]
    if not named:
        return _fewest(compared)
    speeds = cost(report)
    fastest = max(named, key=lambda pair: speeds.goodness(report.models.index(pair[0])))
    on_front = f"{len(named)} of {len(compared)} are on the Pareto front; the {'fastest' if fastest[0].speed else 'smallest'} is"
    return f"{on_front} {fastest[0].name}: {_beside(*fastest)}"


def _on_front(report: ReportData) -> set[str]:
    drawn = drawn_models(report)
    accurate, fast = accuracy(report), cost(report)
    if accurate is None:
        return set()
    points = [(fast.goodness(i), accurate.goodness(i)) for i in drawn]
    return {report.models[drawn[i]].name for i in front(points)}


def _fewest(compared: Sequence[tuple[ModelResult, Against]]) -> str:
    sized = [pair for pair in compared if pair[0].size is not None] or compared
    smallest = min(sized, key=lambda pair: pair[0].size.bytes if pair[0].size else 0)
    return f"the smallest of {len(compared)} is {smallest[0].name}: {_beside(*smallest)}"


def _beside(model: ModelResult, against: Against) -> str:
    parts = []
    if against.decode is not None:
        parts.append(_with_noise(f"{speedup(against.decode.ratio)} decode", against.decode))
    if against.size is not None:
        parts.append(shrinkage(against.size.ratio))
    if against.perplexity is not None:
        parts.append(f"perplexity {percent_change(against.perplexity.ratio)}{_significance(against.perplexity)}")
    elif against.bits_per_byte is not None:
        parts.append(
            f"bits per byte {percent_change(against.bits_per_byte.ratio)}{_significance(against.bits_per_byte)}"
        )
    tasks = [(result, change) for result, change in primary_tasks(model) if change is not None]
    if len(tasks) == 1:
        ((result, change),) = tasks
        note = {True: " (significant)", False: " (within noise)", None: ""}[change.significant]
        parts.append(f"{result.task} {result.metric} {signed(change.difference)}{note}")
    elif tasks:
        worse = [result.task for result, change in tasks if is_worse(result, change)]
        count = len(tasks)
        parts.append(
            f"worse beyond noise in {len(worse)} of {count} tasks"
            if worse
            else f"no worse beyond noise in {count} tasks"
        )
    return ", ".join(parts)


def _alone(model: ModelResult, named: bool) -> str:
    parts = [bytes_(model.size.bytes) if model.size else model.scheme]
    if model.text is not None:
        parts.append(f"perplexity {perplexity(model.text.perplexity)}")
    if model.speed is not None:
        parts.append(f"decodes {rate(model.speed.decode_rate.median)}")
    return (f"{model.name}: " if named else "") + ", ".join(parts)


def _significance(change: Change) -> str:
    return {True: " (significant)", False: " (within noise)", None: ""}[change.significant]


def _with_noise(text: str, change: Change) -> str:
    return f"{text} ({noise(change)})" if noise(change) else text
