"""Accuracy, certified bounds and speed: measured again, and compared with what is claimed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.find import find_checkpoint
from ...system.errors import SmeltError
from ..evaluation.evaluate import evaluate
from ..evaluation.problems import device_problems, text_problems
from ..evaluation.scoring.tasks import Tasks
from ..evaluation.settings import Evaluate
from ..results.result import Change, ModelResult
from ..results.this_machine import differences, this_machine
from ..results.wording import interval, perplexity, speedup, times
from .claims import MeasuredClaims
from .finding import Finding, Verdict

# Processors round differently, and a measured speed is that of a moment.
_PERPLEXITY, _KL, _KL_LEAST, _SHARE, _SPEED = 0.005, 0.15, 1e-3, 0.01, 0.9


@dataclass
class Remeasurement:
    """The evaluation that is done again, and what of it cannot be.

    Attributes:
        settings: of the evaluation.
        baseline: the original, if it is here.
        lacking: why something cannot be measured, by ``baseline``, ``text``, ``device`` or the name of a task.
    """

    settings: Evaluate
    baseline: str | None
    lacking: dict[str, str] = field(default_factory=dict)

    @classmethod
    def plan(cls, claims: MeasuredClaims, baseline: str | None, *, trust_task_code: bool = False) -> Remeasurement:
        """What can be measured here.

        Args:
            claims: what was measured.
            baseline: where the original is, if not where the recipe had it.
            trust_task_code: run Python code that tasks' files refer to; what the checkpoint's record says of it counts for nothing.

        Raises:
            SmeltError: the settings in the record cannot be understood.
        """
        recorded = {**claims.settings, "trust_task_code": trust_task_code, "samples": 0, "drafter": None}
        try:
            settings = Evaluate.model_validate(recorded)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise SmeltError(f"smelt.json: claims.measured.settings.{place}: {first['msg']}") from None
        lacking: dict[str, str] = {}
        if device_problems(settings.device):
            lacking["device"] = f"it was measured on the device {settings.device}, which is not here"
            settings = settings.model_copy(update={"device": "cpu", "speed": False})
        if problems := text_problems(settings):
            lacking["text"] = problems[0].what
            settings = settings.model_copy(update={"text": "builtin"})
        kept = []
        for task in settings.tasks:
            try:
                Tasks.find([task], trust_code=trust_task_code)
                kept.append(task)
            except SmeltError as error:
                lacking[task] = str(error)
        found = _found_baseline(claims, baseline, lacking)
        changes: dict[str, Any] = {"tasks": kept, "guarantee": settings.guarantee if found and kept else []}
        return cls(settings.model_copy(update=changes), found, lacking)

    def why_no_task(self, task: str) -> str:
        """Why a task was not measured; it may be one of a group that could not be loaded."""
        return self.lacking.get(task) or next(
            (why for name, why in self.lacking.items() if name not in ("baseline", "text", "device")),
            "it was not measured",
        )


def check_measured(
    checkpoint: Path,
    claims: MeasuredClaims,
    plan: Remeasurement,
    output: Path,
    *,
    trust_remote_code: bool,
    progress: bool,
) -> Iterator[Finding]:
    """Evaluate a checkpoint as its report says, and compare.

    Args:
        checkpoint: its directory.
        claims: what was measured.
        plan: what can be measured here.
        output: gets the new report.
        trust_remote_code: run Python code that comes with a checkpoint.
        progress: show progress on a terminal.
    """
    report = evaluate(
        [checkpoint],
        baseline=plan.baseline,
        settings=plan.settings,
        output=output,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    (model,) = report.candidates
    yield from _text(claims, model, plan)
    yield from _tasks(claims, model, plan)
    yield from _guarantees(claims, model, plan)
    yield from _speed(claims, model, plan)


def _found_baseline(claims: MeasuredClaims, given: str | None, lacking: dict[str, str]) -> str | None:
    name = given or claims.baseline
    try:
        path = find_checkpoint(name).path
        same = CheckpointWeights(path).content_digest() == claims.baseline_fingerprint
    except SmeltError as error:
        lacking["baseline"] = f"the original is not here ({error}); give it with --baseline"
        return None
    if not same:
        lacking["baseline"] = f"{name} has other weights than the original had; give that with --baseline"
        return None
    return name


def _text(claims: MeasuredClaims, model: ModelResult, plan: Remeasurement) -> Iterator[Finding]:
    if claims.perplexity is None:
        return
    what = f"perplexity {perplexity(claims.perplexity)}"
    if "text" in plan.lacking or model.text is None:
        yield Finding(what, "not measurable here", plan.lacking.get("text", "it was not measured"))
        return
    found = model.text.perplexity
    agrees = abs(found / claims.perplexity - 1) <= _PERPLEXITY
    yield Finding(what, _verdict(agrees), f"here it is {perplexity(found)} ({_PERPLEXITY:.1%} are allowed)")
    beside = model.against
    if claims.perplexity_ratio is not None:
        what = f"perplexity beside the original's {claims.perplexity_ratio - 1:+.2%}"
        if beside is None or beside.perplexity is None:
            yield Finding(what, "not measurable here", plan.lacking.get("baseline", "it was not measured"))
        else:
            ratio = beside.perplexity.ratio
            agrees = abs(ratio / claims.perplexity_ratio - 1) <= _PERPLEXITY
            yield Finding(what, _verdict(agrees), f"here {ratio - 1:+.2%} ({100 * _PERPLEXITY:.1f} points are allowed)")
    if claims.kl is not None:
        what = f"KL divergence {claims.kl:.4f}"
        if beside is None or beside.kl is None:
            yield Finding(what, "not measurable here", plan.lacking.get("baseline", "it was not measured"))
        else:
            allowed = max(_KL * claims.kl, _KL_LEAST)
            agrees = abs(beside.kl - claims.kl) <= allowed
            yield Finding(what, _verdict(agrees), f"here it is {beside.kl:.4f} ({allowed:.4f} are allowed)")


def _tasks(claims: MeasuredClaims, model: ModelResult, plan: Remeasurement) -> Iterator[Finding]:
    measured = {(each.task, each.metric, each.filter): each for each in model.tasks}
    for claim in claims.tasks:
        what = f"{claim.task} {claim.metric} {claim.value:.4f} over {claim.items:,} items"
        found = measured.get((claim.task, claim.metric, claim.filter))
        if found is None:
            yield Finding(what, "not measurable here", plan.why_no_task(claim.task))
        elif found.items != claim.items:
            yield Finding(what, "not measurable here", f"the task has {found.items:,} items here")
        else:
            # A metric that is no share, such as a perplexity, may be off by a share of itself.
            allowed = max(_SHARE, 1.5 / claim.items) * max(1.0, abs(claim.value))
            agrees = abs(found.value - claim.value) <= allowed
            yield Finding(what, _verdict(agrees), f"here it is {found.value:.4f} ({allowed:.4f} are allowed)")


def _guarantees(claims: MeasuredClaims, model: ModelResult, plan: Remeasurement) -> Iterator[Finding]:
    known = {(each.claim, each.what): each for each in (model.against.guarantees if model.against else [])}
    for claim in claims.guarantees:
        what = f"certified that {claim.what} loses at most {claim.limit:.2%} ({claim.confidence:.0%})"
        found = known.get((claim.claim, claim.what))
        if found is None:
            why = plan.lacking.get("baseline") or (
                plan.lacking.get("text", "it was not measured") if claim.what == "ppl" else plan.why_no_task(claim.what)
            )
            yield Finding(what, "not measurable here", why)
        else:
            yield Finding(what, _verdict(found.verdict == "certified"), f"here: {found.sentence()}")


def _speed(claims: MeasuredClaims, model: ModelResult, plan: Remeasurement) -> Iterator[Finding]:
    if claims.speed is None:
        return
    elsewhere = differences(claims.machine, this_machine(plan.settings.device))
    beside = model.against
    pairs = [
        ("decoding", claims.speed.decode, beside.decode if beside else None),
        ("prompts", claims.speed.prefill, beside.prefill if beside else None),
        *(
            (f"{concurrency} requests at once", claim, beside.loads.get(concurrency) if beside else None)
            for concurrency, claim in claims.speed.loads.items()
        ),
    ]
    for name, claim, found in pairs:
        if claim is None:
            continue
        what = f"{name} {speedup(claim.ratio)} than the original on {claims.machine.processor}"
        if found is None:
            why = plan.lacking.get("device") or plan.lacking.get("baseline", "it was not measured")
            yield Finding(what, "not measurable here", why)
            continue
        here = f"here {_ratio(found)}, then {_ratio(claim)}"
        reached = found.ratio >= _SPEED * claim.ratio or _overlap(found, claim)
        if not reached and elsewhere:
            yield Finding(what, "not measurable here", f"{here}, on another machine: {elsewhere[0]}")
        else:
            yield Finding(what, _verdict(reached), here)


def _ratio(change: Change) -> str:
    bounds = interval(change.interval, times)
    return f"{times(change.ratio)}{f' ({bounds})' if bounds else ''}"


def _overlap(one: Change, other: Change) -> bool:
    if one.interval is None or other.interval is None:
        return False
    return one.interval[1] >= other.interval[0] and other.interval[1] >= one.interval[0]


def _verdict(agrees: bool) -> Verdict:
    return "confirmed" if agrees else "not confirmed"
