"""Conditions on a report, for continuous integration: ``ppl>+2%``, ``decode_speedup<1.5``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...system.errors import SmeltError, nearest_name
from ..results.report import ReportData
from ..results.result import ModelResult

if TYPE_CHECKING:
    from .settings import Evaluate

# From a model and its baseline to a number; a relative one is a ratio, whose change gates give in percent.
_RATIOS: dict[str, Callable[[ModelResult], float | None]] = {
    "ppl": lambda m: m.against.perplexity.ratio if m.against and m.against.perplexity else None,
    "bits_per_byte": lambda m: m.against.bits_per_byte.ratio if m.against and m.against.bits_per_byte else None,
    "size": lambda m: m.against.size.ratio if m.against and m.against.size else None,
    "memory": lambda m: m.against.memory.ratio if m.against and m.against.memory else None,
}
_VALUES: dict[str, Callable[[ModelResult], float | None]] = {
    "decode_speedup": lambda m: m.against.decode.ratio if m.against and m.against.decode else None,
    "prefill_speedup": lambda m: m.against.prefill.ratio if m.against and m.against.prefill else None,
    "draft_speedup": lambda m: min(load.speedup.ratio for load in m.drafts.loads) if m.drafts else None,
    "kl": lambda m: m.against.kl if m.against else None,
    "top1": lambda m: m.against.top1_agreement if m.against else None,
    "decode": lambda m: m.speed.decode_rate.median if m.speed else None,
    "prefill": lambda m: m.speed.prefill_rate.median if m.speed else None,
}
# The quantities behind the ratios, for gates without a percentage.
_ABSOLUTES: dict[str, Callable[[ModelResult], float | None]] = {
    "ppl": lambda m: m.text.perplexity if m.text else None,
    "bits_per_byte": lambda m: m.text.bits_per_byte if m.text else None,
    "size": lambda m: m.size.bytes if m.size else None,
    "memory": lambda m: m.speed.peak_memory_bytes if m.speed else None,
}
_FORM = re.compile(
    r"^\s*(?P<metric>[\w.:/-]+?)\s*(?P<sign>[<>])\s*(?P<bound>[+-]?\d+(\.\d+)?([eE][+-]?\d+)?)\s*(?P<percent>%?)\s*$"
)


@dataclass(frozen=True)
class Gate:
    """A condition that makes a report fail.

    Attributes:
        text: as it was written.
        metric: its metric; ``task:NAME`` is the primary metric of a task.
        above: whether values above the bound fail, or those below.
        bound: the number.
        percent: whether it is a change from the baseline, in percent (for a task's metric, in points).
    """

    text: str
    metric: str
    above: bool
    bound: float
    percent: bool

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read ``ppl>+2%``, ``kl>0.05``, ``decode_speedup<1.5`` or ``task:piqa<-1%``.

        Raises:
            SmeltError: it is not a gate, or its metric is unknown.
        """
        found = _FORM.match(text)
        if found is None:
            raise SmeltError(
                f"--fail-if {text!r}: expected a metric, < or >, and a number, such as ppl>+2% or decode_speedup<1.5"
            )
        metric, percent = found["metric"], bool(found["percent"])
        if metric == "task:":
            raise SmeltError(f"--fail-if {text!r}: task: needs a task's name, as in task:piqa<0.7")
        if not metric.startswith("task:"):
            known = [*_RATIOS, *_VALUES]
            if metric not in known:
                raise SmeltError(
                    f"--fail-if {text!r}: unknown metric {metric!r}; expected {', '.join(known)} or task:NAME{nearest_name(metric, known)}"
                )
            if percent and metric not in _RATIOS:
                raise SmeltError(f"--fail-if {text!r}: {metric} is not relative to the baseline; remove the %")
        bound = float(found["bound"])
        if not math.isfinite(bound):
            raise SmeltError(
                f"--fail-if {text!r}: {found['bound']} is too large, so the gate could never fail; give a smaller bound"
            )
        return cls(text, metric, found["sign"] == ">", bound, percent)

    def problem(self, *, baseline: bool, speed: bool, tasks: bool, drafter: bool) -> str | None:
        """Why it could not be judged whatever is measured, before anything is.

        Args:
            baseline: whether there is one.
            speed, tasks: whether they are measured.
            drafter: whether there is one.
        """
        lacks = None
        if self._is_relative and not baseline:
            lacks = "is relative to a baseline; give one with --baseline"
        elif self.metric in ("decode_speedup", "prefill_speedup", "decode", "prefill", "memory") and not speed:
            lacks = "is about speed, which is not measured; let it be (--speed, or evaluate.speed in a recipe)"
        elif self.metric.startswith("task:") and not tasks:
            lacks = "is about a task, and none is measured; name it with --tasks, or in evaluate.tasks"
        elif self.metric == "draft_speedup" and not drafter:
            lacks = "is about drafts; give a --drafter"
        return None if lacks is None else f"--fail-if {self.text!r}: {self.metric} {lacks}"

    def fallen(self, report: ReportData) -> list[str]:
        """A sentence for each model that fails it. An unmeasured metric fails too: a gate must not pass silently."""
        judged = report.candidates or report.models
        if self.metric == "draft_speedup" and not any(model.drafts for model in judged):
            # A checkpoint drafts for the baseline.
            judged = [model for model in report.models if model.drafts] or judged
        return [sentence for model in judged if (sentence := self._fallen(model))]

    def _fallen(self, model: ModelResult) -> str | None:
        value = self._value(model)
        if value is None:
            return f"gate {self.text} failed: {model.name} has no {self.metric}{' relative to a baseline' if self._is_relative else ''}; it was not measured"
        if math.isnan(value):
            return f"gate {self.text} failed: {self.metric} of {model.name} is not a number"
        if value > self.bound if self.above else value < self.bound:
            by = self._said(abs(value - self.bound)).removeprefix("+")
            side = "above" if self.above else "below"
            return f"gate {self.text} failed: {model.name} has {self.metric} {self._said(value)}, {by} {side} the bound"
        return None

    @property
    def _is_relative(self) -> bool:
        return self.percent or self.metric in ("decode_speedup", "prefill_speedup", "kl", "top1")

    def _value(self, model: ModelResult) -> float | None:
        if self.metric.startswith("task:"):
            from ..results.tasks import primary_tasks

            name = self.metric.removeprefix("task:")
            found = next((pair for pair in primary_tasks(model, with_members=True) if pair[0].task == name), None)
            if found is None:
                return None
            result, change = found
            return result.value if not self.percent else None if change is None else 100 * change.difference
        if self.percent:
            ratio = _RATIOS[self.metric](model)
            return None if ratio is None else 100 * (ratio - 1)
        return (_VALUES.get(self.metric) or _ABSOLUTES[self.metric])(model)

    def _said(self, value: float) -> str:
        if self.percent:
            return f"{value:+.2f}%"
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def raise_unmeasured(gates: Sequence[Gate], settings: Evaluate, *, baseline: bool) -> None:
    """Refuse gates about what an evaluation will not measure.

    Raises:
        SmeltError: one line for each.
    """
    has = {"speed": bool(settings.speed), "tasks": bool(settings.tasks), "drafter": settings.drafter is not None}
    problems = [problem for gate in gates if (problem := gate.problem(baseline=baseline, **has)) is not None]
    of_tasks = [gate for gate in gates if gate.metric.startswith("task:")]
    if of_tasks and not problems:
        from .problems import find_tasks  # imported late: lm-eval takes seconds

        tasks = find_tasks(settings)
        known = [] if tasks is None else [*tasks.loaded, *tasks.valued_groups]
        for gate in of_tasks:
            name = gate.metric.removeprefix("task:")
            if name not in known:
                more = nearest_name(name, known) or f"; those are {', '.join(known)}"
                problems.append(f"--fail-if {gate.text!r}: {name} is none of the tasks{more}")
    if problems:
        raise SmeltError("\n".join(problems))
