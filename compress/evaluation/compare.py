"""Compare two reports, from their numbers alone."""

from __future__ import annotations

from typing import Literal

from ...system.errors import SmeltError
from ..results.report import ReportData
from ..results.result import ModelResult
from ..results.this_machine import differences
from .against import against, incomparable


def compare(before: ReportData, after: ReportData, *, allow_foreign_baseline: bool = False) -> list[ReportData]:
    """Compare each model of the second report with the model of the same name in the first.

    Args:
        before: the report to compare with.
        after: the report to compare.
        allow_foreign_baseline: compare speeds of different machines too.

    Raises:
        SmeltError: the reports have no model in common, or have speeds from different machines.
    """
    from ..reporting.verdict import verdict

    pairs = _pairs(before, after)
    apart = differences(before.machine, after.machine)
    timed = any(one.speed and other.speed for one, other in pairs)
    if apart and timed and not allow_foreign_baseline:
        raise SmeltError(
            f"the reports come from different machines ({'; '.join(apart)}), so their speeds cannot be compared;"
            " pass --allow-foreign-baseline to compare them anyway"
        )
    warnings = ["speeds were measured in different runs, not in turns: small differences may be noise"] if timed else []
    if apart and timed:
        warnings.append(f"the reports come from different machines: {'; '.join(apart)}")
    found = []
    for one, other in pairs:
        base = _as(one, "baseline", f"{one.name} (before)")
        model = _as(other, "candidate", f"{other.name} (after)" if one.name == other.name else other.name)
        beside = against(base, model, after.machine)
        model = model.model_copy(update={"against": beside})
        missing = list(dict.fromkeys([*before.missing, *after.missing]))
        report = ReportData(
            title=f"{base.name} and {model.name}",
            status="partial" if missing else "complete",
            missing=missing,
            verdict="",
            machine=after.machine,
            versions=after.versions,
            settings=after.settings,
            models=[base, model],
            warnings=[*warnings, *incomparable(base, model, beside)],
        )
        found.append(report.model_copy(update={"verdict": verdict(report)}))
    return found


def _pairs(before: ReportData, after: ReportData) -> list[tuple[ModelResult, ModelResult]]:
    theirs = {model.name: model for model in before.candidates or before.models}
    pairs = [(theirs[model.name], model) for model in after.candidates or after.models if model.name in theirs]
    if pairs:
        return pairs
    if len(theirs) == 1 and len(after.candidates or after.models) == 1:
        return [(next(iter(theirs.values())), (after.candidates or after.models)[0])]
    names = ", ".join(model.name for model in after.candidates or after.models)
    raise SmeltError(f"the reports have no model of the same name: {', '.join(theirs)} and {names}")


def _as(model: ModelResult, role: Literal["baseline", "candidate"], name: str) -> ModelResult:
    """The model as measured in a separate run, so that its rounds are not paired."""
    speed = None if model.speed is None else model.speed.model_copy(update={"interleaved": False})
    return model.model_copy(update={"role": role, "name": name, "against": None, "speed": speed})
