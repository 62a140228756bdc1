"""Running a sweep: make every trial's checkpoint, then evaluate all of them and the original in one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...models.directory.directory import ModelDirectory
from ...models.directory.find import find_model
from ...system.errors import SmeltError
from ...system.progress import Progress
from ...system.storage.run_directory import Output
from ..evaluation.evaluate import measured
from ..evaluation.measure import Evaluation
from ..evaluation.problems import fewest_positions, find_tasks
from ..evaluation.scoring.tasks import Tasks
from ..evaluation.subject import Subject
from ..pipeline.plan import Plan
from ..pipeline.self_text import written_once
from ..reporting.card import write_card
from ..reporting.verdict import verdict
from ..results.report import ReportData
from ..verification.claims import claim_measured
from .on_ray import run_on_ray
from .trial_run import run_trial
from .trials import Sweep, Trial


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        report: of all trials that succeeded; None with ``evaluate: false``.
        checkpoints: by trial.
        failed: why a trial failed, by trial.
    """

    report: ReportData | None
    checkpoints: dict[str, Path]
    failed: dict[str, str]


def run_sweep(sweep: Sweep, *, fresh: bool = False, progress: bool = True, ray: str | None = None) -> SweepResult:
    """Run or resume a sweep; finished trials and measurements are skipped.

    Args:
        sweep: the sweep.
        fresh: start over.
        progress: show progress on a terminal.
        ray: the address of a Ray cluster to run the trials on (``local`` starts one here); by default they run here, in
            order. Speed is always measured on this machine, so that the figures are comparable.

    Raises:
        SmeltError: a trial's recipe would fail (found before any work), or every trial failed.
    """
    show = Progress(progress)
    root = Path(sweep.base.output)
    with Output(root, {"kind": "sweep"}, fresh=fresh, reads=sweep.base.content()) as output:
        plan_trials(sweep, fresh=fresh)
        tasks = find_tasks(sweep.base.evaluate) if sweep.base.evaluate else None
        if sweep.base.calibrate.source == "self":
            show.say("generating the calibration text, once for all trials")
            written_once(sweep.base, output.journal / "calibration", show)
        checkpoints: dict[str, Path] = {}
        failed: dict[str, str] = {}

        def completed(trial: Trial, problem: str | None) -> None:
            if problem is None:
                checkpoints[trial.name] = Path(trial.recipe.output) / "checkpoint"
            else:
                failed[trial.name] = problem
            done = len(checkpoints) + len(failed)
            show.say(f"[{done}/{len(sweep.trials)}] {trial.name}{f' failed: {problem}' if problem else ''}")

        shared = output.journal / "calibration"
        if ray is None:
            _in_order(sweep.trials, completed, shared, fresh, progress)
        else:
            run_on_ray(sweep.trials, completed, shared, fresh, ray, sweep.settings.resources)
        if not checkpoints:
            raise SmeltError("\n".join(["every trial failed", *(f"{name}: {why}" for name, why in failed.items())]))
        report = _measure(sweep, checkpoints, failed, tasks, output, show) if sweep.base.evaluate else None
    return SweepResult(report, checkpoints, failed)


def _in_order(
    trials: Sequence[Trial], completed: Callable[[Trial, str | None], None], shared: Path, fresh: bool, progress: bool
) -> None:
    for trial in trials:
        completed(trial, run_trial(trial, shared, fresh, progress))


def plan_trials(sweep: Sweep, *, fresh: bool = False) -> dict[str, Plan]:
    """The plan of each trial, by its name.

    Raises:
        SmeltError: a trial, or the evaluation of all, would fail; a line for each reason.
    """
    plans = {trial.name: Plan.make(trial.recipe, fresh=fresh) for trial in sweep.trials}
    problems = [f"trial {name}: {problem}" for name, plan in plans.items() for problem in plan.problems]
    # Trials have no evaluation of their own; check the sweep's.
    if sweep.base.evaluate:
        first = sweep.trials[0].recipe.model_copy(update={"evaluate": sweep.base.evaluate})
        problems += [str(p) for p in Plan.make(first, fresh=True).problems if str(p) not in "\n".join(problems)]
    if sweep.base.evaluate and sweep.base.evaluate.drafter is not None:
        problems.append(
            "evaluate.drafter: is not measured in a sweep; leave it out, and pass a trial's checkpoint to smelt eval --drafter"
        )
    if problems:
        raise SmeltError("\n".join(problems))
    return plans


def _measure(
    sweep: Sweep,
    checkpoints: dict[str, Path],
    failed: dict[str, str],
    tasks: Tasks | None,
    output: Output,
    show: Progress,
) -> ReportData:
    base = sweep.base
    assert base.evaluate
    original = find_model(base.model, revision=base.revision, trust_remote_code=base.trust_remote_code)
    name = original.path.name if Path(base.model).exists() else base.model
    if name in checkpoints:
        name = f"{name} (original)"
    subjects = [Subject(name, original, "baseline")]
    for trial in sweep.trials:
        if trial.name in checkpoints:
            path = checkpoints[trial.name]
            directory = ModelDirectory(str(path.relative_to(output.path.resolve())), path, base.trust_remote_code)
            subjects.append(Subject(trial.name, directory, "candidate"))
    title = f"{name}: a sweep of {len(sweep.trials)} trials"
    asked = base.evaluate.within(fewest_positions([subject.directory for subject in subjects]))
    evaluation = Evaluation(subjects, asked, tasks, output.journal / "evaluation", show, title=title)
    for trial, why in failed.items():
        evaluation.warn(f"trial {trial} failed and is not in this report: {why}")

    def cards(report: ReportData) -> None:
        for model in report.candidates:
            pair = [m for m in report.models if m.role == "baseline" or m.name == model.name]
            alone = report.model_copy(update={"models": pair})
            write_card(alone.model_copy(update={"verdict": verdict(alone)}), checkpoints[model.name], original)
            claim_measured(checkpoints[model.name], alone, base.model)

    return measured(evaluation, output.path, cards)
