"""The two quantities that the plot shows, and every model's values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...results import wording
from ...results.report import ReportData
from ...results.result import Interval, ModelResult, TaskResult, Text
from ...results.tasks import primary_tasks


@dataclass(frozen=True)
class Measure:
    """A quantity that models are compared by.

    Attributes:
        title: its name on an axis.
        better_high: whether more is better.
        values: by the model's position in the report; only where it was measured.
        intervals: likewise.
        said: each value as text.
    """

    title: str
    better_high: bool
    values: dict[int, float]
    intervals: dict[int, Interval]
    said: dict[int, str]

    def __post_init__(self) -> None:
        for model, bounds in list(self.intervals.items()):
            if not all(map(math.isfinite, bounds)):
                del self.intervals[model]

    def goodness(self, model: int) -> float:
        """The value, negated if less is better."""
        return self.values[model] if self.better_high else -self.values[model]


def cost(report: ReportData) -> Measure:
    """Decode speed if measured for any model, else the checkpoint's bytes."""
    speeds = {i: m.speed.decode_rate for i, m in enumerate(report.models) if m.speed is not None}
    speeds = {i: s for i, s in speeds.items() if math.isfinite(s.median)}
    if speeds:
        return Measure(
            "Decoding, tokens per second",
            True,
            {i: s.median for i, s in speeds.items()},
            {i: s.range for i, s in speeds.items() if len(s.values) > 1},
            {
                i: f"decodes {_with(wording.rate(s.median), wording.spread(s, wording.number))}"
                for i, s in speeds.items()
            },
        )
    sizes = {i: float(m.size.bytes) for i, m in enumerate(report.models) if m.size is not None}
    return Measure("Checkpoint, GB", False, {i: b / 1e9 for i, b in sizes.items()}, {}, dict.fromkeys(sizes, ""))


def accuracy(report: ReportData) -> Measure | None:
    """Perplexity where all read the same tokens, bits per byte where they did not, else the tasks' mean."""
    texts = {i: m.text for i, m in enumerate(report.models) if m.text is not None}
    texts = {i: t for i, t in texts.items() if math.isfinite(t.perplexity) and math.isfinite(t.bits_per_byte)}
    if texts and len({t.text_sha256 for t in texts.values()}) == 1:
        values = {i: t.perplexity for i, t in texts.items()}
        bounds = _perplexity_intervals(report, texts)
        said = {
            i: f"perplexity {_with(wording.perplexity(t.perplexity), wording.interval(t.perplexity_interval, wording.perplexity))}"
            for i, t in texts.items()
        }
        source = next(iter(texts.values())).source
        return Measure(f"Perplexity on {source}", False, values, bounds, said)
    if texts:
        values = {i: t.bits_per_byte for i, t in texts.items()}
        return Measure("Bits per byte", False, values, {}, {i: f"{v:.3f} bits per byte" for i, v in values.items()})
    return _task_mean(report)


def _perplexity_intervals(report: ReportData, texts: dict[int, Text]) -> dict[int, Interval]:
    """Intervals of paired differences from the baseline, which are tighter than those of values; of values without one."""
    base = report.baseline
    if base is None or base.text is None:
        return {i: t.perplexity_interval for i, t in texts.items() if t.perplexity_interval is not None}
    changes = {i: report.models[i].against for i in texts}
    found = {i: a.perplexity.interval for i, a in changes.items() if a is not None and a.perplexity is not None}
    level = base.text.perplexity
    return {i: (level * bounds[0], level * bounds[1]) for i, bounds in found.items() if bounds is not None}


def _primary(model: ModelResult) -> dict[str, TaskResult]:
    """The primary metric of each task for which more is better; of a group the group's, which has its tasks'."""
    found = (result for result, _ in primary_tasks(model))
    return {each.task: each for each in found if each.higher_is_better and math.isfinite(each.value)}


def _task_mean(report: ReportData) -> Measure | None:
    metrics = {i: _primary(m) for i, m in enumerate(report.models)}
    metrics = {i: found for i, found in metrics.items() if found}
    if not metrics:
        return None
    # Means over different tasks are not comparable.
    shared = set.intersection(*(set(found) for found in metrics.values()))
    if not shared:
        return None
    values = {i: sum(found[t].value for t in shared) / len(shared) for i, found in metrics.items()}
    only = next(iter(shared)) if len(shared) == 1 else None
    bounds = {i: b for i, found in metrics.items() if only and (b := found[only].interval) is not None}
    title = f"{only}, {next(iter(metrics.values()))[only].metric}" if only else f"Mean of {len(shared)} tasks"
    return Measure(title, True, values, bounds, {i: f"{title}: {wording.number(v)}" for i, v in values.items()})


def _with(text: str, bounds: str) -> str:
    return f"{text} ({bounds})" if bounds else text
