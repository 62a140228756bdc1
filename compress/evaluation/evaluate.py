"""``smelt eval``: measure and compare checkpoints, and write the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...system.errors import SmeltError, raise_problems
from ...system.progress import Progress
from ...system.storage.paths import named_path
from ...system.storage.run_directory import Output
from ..reporting.report_files import load, save
from ..results.report import ReportData
from ..results.result import ModelResult
from ..results.this_machine import differences, this_machine
from .drafts import EvaluatedDrafter
from .measure import Evaluation
from .problems import (
    fewest_positions,
    find_tasks,
    length_problems,
    server_notes,
    server_problems,
    settings_problems,
    task_problems,
    text_problems,
)
from .settings import Evaluate
from .subject import Subject, subjects

if TYPE_CHECKING:
    from .scoring.on_server import RemoteModel


def evaluate(
    checkpoints: str | Path | Sequence[str | Path],
    *,
    baseline: str | Path | None = None,
    servers: Sequence[RemoteModel] = (),
    settings: Evaluate | None = None,
    output: str | Path,
    trust_remote_code: bool = False,
    allow_foreign_baseline: bool = False,
    fresh: bool = False,
    progress: bool = True,
) -> ReportData:
    """Measure checkpoints, and write ``report.html``, ``report.md`` and ``report.json``.

    Args:
        checkpoints: one or several: directories, hub names or ``builtin:smelt-6m``.
        baseline: a checkpoint to compare with, measured in the same run; or an earlier ``report.json``, whose baseline
            (or only model) is used without measuring again.
        servers: models behind servers, to be measured too.
        settings: what to measure; by default the builtin text, samples and speed, and no tasks.
        output: the directory for the reports. Finished measurements are kept in it and reused.
        trust_remote_code: run the checkpoints' own Python.
        allow_foreign_baseline: accept a baseline report from another machine.
        fresh: measure everything again.
        progress: show progress on a terminal.

    Returns:
        What ``report.json`` holds.

    Raises:
        SmeltError: something is wrong with a checkpoint, a task or the output. Measurements finished before are
            reported as a partial report.
    """
    if isinstance(checkpoints, (str, Path)):
        checkpoints = [checkpoints]
    asked = settings or Evaluate()
    raise_problems(settings_problems(asked, "", of_recipe=False))
    if asked.guarantee and baseline is None:
        raise SmeltError("guarantee is about a loss beside a baseline; give one")
    kept = (
        _kept_baseline(named_path(str(baseline)), asked.device, allow_foreign_baseline)
        if _is_report(baseline)
        else None
    )
    found = subjects(
        [str(name) for name in checkpoints],
        str(baseline) if baseline is not None and kept is None else None,
        trust_remote_code=trust_remote_code,
    )
    found += _behind_servers(servers)
    if not any(subject.role == "candidate" for subject in found):
        raise SmeltError("there is nothing to evaluate; give a checkpoint, or a server with --server")
    directories = [subject.directory for subject in found]
    asked = asked.within(fewest_positions(directories))
    raise_problems(text_problems(asked, "") + length_problems(asked, directories, ""))
    tasks = find_tasks(asked)
    if tasks is not None:
        raise_problems(task_problems(asked, tasks, directories, ""))
    raise_problems(server_problems(found, asked, tasks))
    drafter = EvaluatedDrafter.find(asked.drafter, trust_remote_code=trust_remote_code) if asked.drafter else None
    if drafter is not None and not drafter.drafts_for(found):
        raise SmeltError(
            f"drafter {asked.drafter}: there is no model that it could draft for; give one, as CHECKPOINT or --baseline"
        )
    show = Progress(progress)
    if kept is not None and kept.name in (subject.name for subject in found):
        kept = kept.model_copy(update={"name": f"{kept.name} (kept)"})
    reads = [str(each) for each in (*checkpoints, baseline, drafter and drafter.path, asked.text) if each is not None]
    with Output(Path(output), {"kind": "evaluation"}, fresh=fresh, reads=reads) as place:
        title = _title(found, kept)
        evaluation = Evaluation(
            found, asked, tasks, place.journal, show, title=title, drafter=drafter, kept_baseline=kept
        )
        for sentence in server_notes(found, asked, tasks):
            evaluation.warn(sentence)
        return measured(evaluation, place.path)


def _behind_servers(servers: Sequence[RemoteModel]) -> list[Subject]:
    names = [server.name for server in servers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SmeltError(f"{twice} is named twice; name each server once")
    return [Subject(server.name, server.directory, "candidate", server=server) for server in servers]


def measured(
    evaluation: Evaluation, directory: Path, before_saving: Callable[[ReportData], object] = lambda _: None
) -> ReportData:
    """Measure, and save the report; a partial one if that is interrupted or fails.

    Args:
        evaluation: what to measure.
        directory: where the report goes. It holds a partial report from the start, so that no earlier report is taken for
            this one if the process dies.
        before_saving: called with the finished report; the report is complete only when this has returned.
    """
    save(evaluation.report(), directory)
    try:
        evaluation.run()
        report = evaluation.report()
        before_saving(report)
    except BaseException:
        save(evaluation.report(interrupted=True), directory)
        raise
    save(report, directory)
    return report


def _is_report(baseline: str | Path | None) -> bool:
    if baseline is None:
        return False
    path = named_path(str(baseline))
    return path.suffix == ".json" or ((path / "report.json").is_file() and not (path / "checkpoint").is_dir())


def _kept_baseline(path: Path, device: str, foreign: bool) -> ModelResult:
    """The baseline of an earlier report; from another machine only if allowed."""
    report = load(path)
    model = report.baseline or (report.models[0] if len(report.models) == 1 else None)
    if model is None:
        raise SmeltError(f"baseline {path}: has several models but no baseline; name a checkpoint instead")
    apart = differences(report.machine, this_machine(device))
    if apart and not foreign:
        raise SmeltError(
            f"baseline {path}: was measured on another machine ({'; '.join(apart)}), so its speed is not comparable; name the"
            " checkpoint to measure it now, or pass --allow-foreign-baseline"
        )
    kept = model.model_copy(update={"role": "baseline", "against": None, "warnings": list(model.warnings)})
    where = "on another machine" if apart else "in another run"
    kept.warnings.append(f"was measured {where}, not in turns with the others; its report: {path}")
    # Measurements that were not interleaved have no rounds to compare.
    speed = None if kept.speed is None else kept.speed.model_copy(update={"interleaved": False})
    return kept.model_copy(update={"speed": speed})


def _title(found: Sequence[Subject], kept: ModelResult | None) -> str:
    names = [subject.name for subject in found if subject.role == "candidate"]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    beside = kept.name if kept else next((s.name for s in found if s.role == "baseline"), None)
    return f"{shown} beside {beside}" if beside else shown
