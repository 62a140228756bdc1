"""Accuracy, certified bounds and speed: measured again, and compared with what is claimed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.find import find_checkpoint
from ...system.errors import RuntimeProblem, SmeltError
from ...system.settings.checked import checked
from ...system.storage.run_directory import Output
from ..evaluation.evaluate import evaluate
from ..evaluation.guarantee import Guarantee
from ..evaluation.problems import device_problems, text_problems
from ..evaluation.scoring.tasks import Tasks
from ..evaluation.scoring.text import NaNError
from ..evaluation.settings import Evaluate
from ..reporting.report_files import load
from ..results.result import Change, ModelResult
from ..results.this_machine import differences, this_machine
from ..results.wording import interval, perplexity, speedup
from .claims import MeasuredClaims
from .finding import Finding, Verdict

# Processors round differently, and a measured speed is that of a moment.
_PERPLEXITY, _KL, _KL_LEAST, _SHARE, _SPEED = 0.005, 0.15, 1e-3, 0.01, 0.9
_LOWEST = 0.75  # of a ratio, below which no interval confirms it
# A record comes from outside, and what it asks for is done here.
_MOST_REPEATS, _MOST_AT_ONCE, _MOST_LOADS = 50, 512, 16
_NOTHING = "it was not measured"


@dataclass
class Remeasurement:
    """The evaluation that is done again, and what of it cannot be.

    Attributes:
        settings: of the evaluation.
        baseline: the original, if it is here.
        lacking: why something cannot be measured, by ``baseline``, ``text`` or ``speed``.
        tasks: why a task cannot, by the name that the settings have.
        failed: why nothing could be.
    """

    settings: Evaluate
    baseline: str | None
    lacking: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)
    failed: str | None = None

    @classmethod
    def plan(
        cls,
        claims: MeasuredClaims,
        baseline: str | None,
        *,
        trust_remote_code: bool = False,
        trust_task_code: bool = False,
    ) -> Remeasurement:
        """What can be measured here.

        Args:
            claims: what was measured.
            baseline: where the original is, if not where the recipe had it.
            trust_remote_code: run Python code that comes with a checkpoint; then only of an original that is named here.
            trust_task_code: run Python code that tasks' files refer to; what the checkpoint's record says of it counts for nothing.

        Raises:
            SmeltError: the settings in the record cannot be understood, or ask for too much.
        """
        lacking: dict[str, str] = {}
        settings = _settings(claims, trust_task_code)
        if settings.tp * settings.pp > 1:
            lacking["speed"] = f"it was measured on {settings.tp * settings.pp} processes"
            settings = settings.model_copy(update={"tp": 1, "pp": 1, "speed": False})
        if device_problems(settings.device):
            lacking["speed"] = f"it was measured on the device {settings.device}, which is not here"
            settings = settings.model_copy(update={"device": "cpu", "speed": False})
        if problems := text_problems(settings):
            lacking["text"] = problems[0].what
            settings = settings.model_copy(update={"text": "builtin"})
        kept, missing, names = [], {}, set[str]()
        for task in settings.tasks:
            try:
                loaded = Tasks.find([task], trust_code=trust_task_code)
                kept.append(task)
                names |= {*loaded.loaded, *loaded.groups}
            except SmeltError as error:
                missing[task] = str(error)
        if trust_remote_code and baseline is None:
            found = None
            lacking["baseline"] = "--trust-remote-code would run the original's Python, too; name it with --baseline"
        else:
            found = _found_baseline(claims, baseline, lacking)
        wanted = [claim for claim in settings.guarantee if _is_measurable(claim, found, names, lacking)]
        # All claims of an evaluation have one confidence; records from before that may have several.
        first = next((Guarantee.parse(claim).confidence for claim in wanted), None)
        wanted = [claim for claim in wanted if Guarantee.parse(claim).confidence == first]
        return cls(settings.model_copy(update={"tasks": kept, "guarantee": wanted}), found, lacking, missing)

    def why_not(self, *what: str) -> str:
        """Why something was not measured, which needs these."""
        return self.failed or next((self.lacking[each] for each in what if each in self.lacking), _NOTHING)

    def why_no_task(self, task: str) -> str:
        """Why a task was not measured; it may be one of a group that could not be loaded."""
        own = self.tasks.get(task) or next(iter(self.tasks.values()), _NOTHING)
        return self.failed or own


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
    fresh = _is_complete(output)  # only what was interrupted continues
    earlier = _written(output)
    blocked = Output(output, {"kind": "evaluation"}, fresh=fresh).problem()
    if blocked:
        raise SmeltError(f"output: {blocked}")
    model: ModelResult | None = None
    try:
        report = evaluate(
            [checkpoint],
            baseline=plan.baseline,
            settings=plan.settings,
            output=output,
            trust_remote_code=trust_remote_code,
            fresh=fresh,
            progress=progress,
        )
        (model,) = report.candidates
    except NaNError as error:
        yield Finding("what was measured", "not confirmed", str(error))
        return
    except SmeltError as error:
        plan.failed = str(error)
        if not isinstance(error, RuntimeProblem):  # which is what this machine or the runtime cannot serve
            yield Finding("what was measured", "not confirmed", f"measuring it again failed: {error}")
        # What had been measured by then is in the report, unless that is an earlier one.
        here = checkpoint.resolve()
        if _written(output) not in (None, earlier):
            found = load(output).candidates
            model = next((each for each in found if each.path and Path(each.path).resolve() == here), None)
    yield from _text(claims, model, plan)
    yield from _tasks(claims, model, plan)
    yield from _bounds(claims, model, plan)
    yield from _speed(claims, model, plan)


def _settings(claims: MeasuredClaims, trust_task_code: bool) -> Evaluate:
    recorded = {**claims.settings, "trust_task_code": trust_task_code, "samples": 0, "drafter": None}
    where = "smelt.json: claims.measured.settings"
    settings = checked(Evaluate, recorded, lambda place, what: f"{where}.{place}: {what}", most=1)
    speed = settings.speed
    if speed and (
        speed.repeats > _MOST_REPEATS or len(speed.concurrency) > _MOST_LOADS or max(speed.concurrency) > _MOST_AT_ONCE
    ):
        raise SmeltError(
            f"{where}.speed: asks for more than {_MOST_REPEATS} rounds of {_MOST_LOADS} loads of {_MOST_AT_ONCE}"
            " requests; pass --quick"
        )
    return settings


def _written(output: Path) -> tuple[int, int] | None:
    """Which report is there."""
    try:
        found = (output / "report.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_complete(output: Path) -> bool:
    try:
        return json.loads((output / "report.json").read_text(encoding="utf-8")).get("status") == "complete"
    except (OSError, ValueError, AttributeError):
        return False


def _is_measurable(claim: str, baseline: str | None, tasks: set[str], lacking: dict[str, str]) -> bool:
    try:
        found = Guarantee.parse(claim)
    except SmeltError:
        return False
    named = found.what.partition("task:")[2]
    about_tasks = named in tasks if named else bool(tasks)
    return baseline is not None and ("text" not in lacking if found.is_about_text else about_tasks)


def _found_baseline(claims: MeasuredClaims, given: str | None, lacking: dict[str, str]) -> str | None:
    if claims.merged:
        lacking["baseline"] = "the original is it with an adapter merged into it, which no directory holds"
        return None
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


def _text(claims: MeasuredClaims, model: ModelResult | None, plan: Remeasurement) -> Iterator[Finding]:
    claim = claims.text
    if claim is None:
        return
    why = None
    if "text" in plan.lacking or model is None or model.text is None:
        why = plan.why_not("text")
    elif model.text.windows != claim.windows:
        why = f"{model.text.windows} windows were read here, and {claim.windows} then"
    elif model.text.text_sha256 != claim.text_sha256:
        why = "the text is another one, or is tokenized otherwise"
    text, beside = (None, None) if model is None else (model.text, model.against)
    what = f"perplexity {perplexity(claim.perplexity)}"
    if why is not None or text is None:
        yield Finding(what, "not measurable here", why or _NOTHING)
    else:
        agrees = abs(text.perplexity / claim.perplexity - 1) <= _PERPLEXITY
        said = f"here it is {perplexity(text.perplexity)} ({_PERPLEXITY:.1%} are allowed)"
        yield Finding(what, _verdict(agrees), said)
    ratio = beside.perplexity.ratio if beside and beside.perplexity else None
    kl_allowed = max(_KL * (claim.kl or 0.0), _KL_LEAST)
    for named, claimed, found, allowed, say in (
        ("perplexity beside the original's", claim.ratio, ratio, _PERPLEXITY * (claim.ratio or 1.0), _percent),
        ("KL divergence", claim.kl, beside.kl if beside else None, kl_allowed, "{:.4f}".format),
    ):
        if claimed is None:
            continue
        what = f"{named} {say(claimed)}"
        if why is not None or found is None:
            yield Finding(what, "not measurable here", why or plan.why_not("baseline"))
        else:
            verdict = _verdict(abs(found - claimed) <= allowed)
            yield Finding(what, verdict, f"here it is {say(found)} (a difference of {allowed:.4f} is allowed)")


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.2%}"


def _tasks(claims: MeasuredClaims, model: ModelResult | None, plan: Remeasurement) -> Iterator[Finding]:
    measured = {(each.task, each.metric, each.filter): each for each in (model.tasks if model else [])}
    for claim in claims.tasks:
        what = f"{claim.task} {claim.metric} {claim.value:.4f} over {claim.items:,} items"
        found = measured.get((claim.task, claim.metric, claim.filter))
        if found is None:
            yield Finding(what, "not measurable here", plan.why_no_task(claim.task))
        elif found.items != claim.items:
            yield Finding(what, "not measurable here", f"{found.items:,} items were answered here")
        else:
            # A metric that is no share, such as a perplexity, may be off by a share of itself.
            allowed = max(_SHARE, 1.5 / claim.items) * max(1.0, abs(claim.value))
            agrees = abs(found.value - claim.value) <= allowed
            yield Finding(what, _verdict(agrees), f"here it is {found.value:.4f} ({allowed:.4f} are allowed)")


def _bounds(claims: MeasuredClaims, model: ModelResult | None, plan: Remeasurement) -> Iterator[Finding]:
    beside = model.against if model else None
    known = {(each.claim, each.what): each for each in (beside.guarantees if beside else [])}
    for claim in claims.bounds:
        what = claim.sentence()
        found = known.get((claim.claim, claim.what))
        if found is None:
            about_text = claim.what in ("ppl", "kl")
            why = plan.why_not("baseline", *(["text"] if about_text else []))
            if why == _NOTHING and not about_text:
                why = plan.why_no_task(claim.what)
            yield Finding(what, "not measurable here", why)
        elif (found.limit, found.confidence) != (claim.limit, claim.confidence):
            yield Finding(what, "not confirmed", f"what was certified is {claim.claim!r}")
        else:
            yield Finding(what, _verdict(found.verdict == "certified"), f"here: {found.sentence()}")


def _speed(claims: MeasuredClaims, model: ModelResult | None, plan: Remeasurement) -> Iterator[Finding]:
    if claims.speed is None:
        return
    elsewhere = differences(claims.machine, this_machine(plan.settings.device))
    beside = model.against if model else None
    pairs = [
        ("decode", "decoding", claims.speed.decode, beside.decode if beside else None),
        ("prefill", "prompts", claims.speed.prefill, beside.prefill if beside else None),
        *(
            (concurrency, f"{concurrency} requests at once", claim, beside.loads.get(concurrency) if beside else None)
            for concurrency, claim in claims.speed.loads.items()
        ),
    ]
    for key, name, claim, found in pairs:
        if claim is None:
            continue
        what = f"{name} {speedup(claim)} than the original on {claims.machine.processor}"
        if found is None:
            yield Finding(what, "not measurable here", plan.why_not("speed", "baseline"))
            continue
        # A wide interval excuses no more than a quarter.
        lowest = max(claims.speed.intervals.get(key, (claim, claim))[0], _LOWEST * claim)
        reached = found.ratio >= _SPEED * claim or (found.interval is not None and found.interval[1] >= lowest)
        if not reached and elsewhere:
            yield Finding(what, "not measurable here", f"here {_ratio(found)}, on another machine: {elsewhere[0]}")
        else:
            allowed = f"; {_SPEED * claim:.2f}× or an interval that reaches {lowest:.2f}× confirms it"
            yield Finding(what, _verdict(reached), f"here {_ratio(found)}{'' if reached else allowed}")


def _ratio(change: Change) -> str:
    bounds = interval(change.interval, lambda ratio: f"{ratio:.2f}×")
    return f"{change.ratio:.2f}×{f' ({bounds})' if bounds else ''}"


def _verdict(agrees: bool) -> Verdict:
    return "confirmed" if agrees else "not confirmed"
