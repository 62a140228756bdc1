"""Running a recipe: check, calibrate, do the steps, reload, publish, evaluate, report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...distill.run.sharding import shards
from ...models.directory.directory import ModelDirectory
from ...models.steps.step import Given, PreparedStep, RunContext, StepRecord
from ...models.streaming.streamed import StreamedModel
from ...models.structure.open_model import OpenModel
from ...models.text.windows import fingerprint, recut
from ...quant.stored.compressed import CompressedModel, open_dense
from ...runtime.engine.setup.config import draft_checkpoint
from ...system.errors import Problem, raise_problems
from ...system.hardware.machine import available_memory
from ...system.hardware.resources import compute_dtype, return_memory_at_once
from ...system.processes.process_group import Processes
from ...system.progress import Progress
from ...system.storage.digests import digest
from ...system.storage.files import write_text
from ...system.storage.new_directory import RECORD
from ...system.storage.run_directory import Output
from ...system.storage.tensor_files import SafetensorsFile, save_tensors
from ...system.versions import versions
from ..evaluation.drafts import EvaluatedDrafter
from ..evaluation.evaluate import measured
from ..evaluation.measure import Evaluation
from ..evaluation.scoring.runtime_reader import NotServed
from ..evaluation.settings import RESULT, Evaluate
from ..evaluation.subject import Subject, worst_first
from ..recipe.recipe import Recipe
from ..reporting.card import write_card
from ..reporting.report_files import load
from ..results.report import ReportData
from ..verification.claims import Claims, claim_measured
from ..verification.files import digests
from .build import steps_of
from .plan import Plan, run_identity
from .self_text import written_once
from .verify import Reload, random_windows, reload, whole_model_bytes


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        checkpoint: a Hugging Face directory that ``AutoModelForCausalLM.from_pretrained`` loads.
        report: sizes, accuracy before and after, and every layer's error.
    """

    checkpoint: Path
    report: ReportData


def run(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    fresh: bool = False,
    progress: bool = True,
    name: str | None = None,
    calibration_cache: Path | None = None,
    alone: bool = False,
) -> RunResult:
    """Run a recipe, or continue where an interrupted run of the same recipe stopped.

    Args:
        recipe: what to do: a :class:`Recipe`, its sections as a mapping, or its file.
        fresh: start over even if the output holds an earlier run.
        progress: show progress bars when standard error is a terminal.
        name: the model's name in the report, instead of the recipe's.
        alone: run in this process only, even if a launcher has started several.
        calibration_cache: a directory in which runs share self-generated calibration text.

    Several processes that a launcher has started (docs/recipes.md) share the calibration; all get the same result.

    Returns:
        The checkpoint's path and the report. A run that is already complete returns at once.

    Raises:
        SmeltError: something is wrong with the recipe, model, data or output; nothing half-written is
            left under ``checkpoint``, and the same command continues after the cause is fixed.
    """
    if not isinstance(recipe, Recipe):
        recipe = Recipe.of(recipe) if isinstance(recipe, Mapping) else Recipe.load(recipe)
    device = recipe.calibrate.device
    processes = Processes(torch.device(device)) if alone else Processes.launched(device)
    over = shards(processes) if any(step.training for step in steps_of(recipe)) else 1
    plan = Plan.make(recipe, fresh=fresh, processes=processes.here, shards=over)
    raise_problems([*plan.problems, *_sharing_problems(plan, processes.count)])
    recipe = plan.recipe
    # From here on the first process changes files that the others' plans have checked.
    identity = run_identity(recipe, plan.steps, plan.opened, plan.adapter)
    processes.agree("a recipe, model or version", digest(identity))
    show = Progress(progress and processes.is_main)
    if 2 * plan.cost.memory > available_memory():
        return_memory_at_once()
    if not processes.is_main:
        return _run_worker(plan, processes, show)
    with Output(Path(recipe.output), identity, fresh=fresh, reads=recipe.content()) as output:
        has_work = not output.is_complete and not output.has_checkpoint
        processes.broadcast(lambda: ({}, has_work))
        if output.is_complete:
            output.forget_intermediate()  # of a run that was killed as it ended
            show.say(f"{output.path} is already complete; pass --fresh to run it again")
            result = RunResult(output.checkpoint, load(output.report))
            processes.wait()
            return result
        if not output.has_checkpoint:
            tokens = _calibration(plan, output.journal, calibration_cache, show)
            _make_checkpoint(plan, output, tokens, name or recipe.model, show, processes)
        result = _evaluate_and_report(plan, output, name or recipe.model, show)
        processes.wait()
        return result


def _sharing_problems(plan: Plan, count: int) -> list[Problem]:
    trainings = [step.training for step in plan.steps if step.training is not None]
    return [problem for training in trainings for problem in training.sharing_problems(plan.model, count)]


def _run_worker(plan: Plan, processes: Processes, show: Progress) -> RunResult:
    """The work of a process other than the first: its share of the steps."""
    output = Output(Path(plan.recipe.output), {})  # not entered: it belongs to the first process
    _, has_work = processes.broadcast(lambda: ({}, None))
    if has_work:
        tokens = processes.broadcast(lambda: ({}, None))[0]["tokens"].cpu()
        _run_steps(plan, output, tokens, show, processes)
    processes.wait()
    return RunResult(output.checkpoint, load(output.report))


def _context(
    plan: Plan,
    model: OpenModel,
    output: Output,
    number: int,
    tokens: torch.Tensor,
    show: Progress,
    processes: Processes,
) -> RunContext:
    dtype = compute_dtype(model.dtype, plan.recipe.calibrate.device)
    journal, adapter = output.journal / f"step-{number}", plan.adapter and plan.adapter.fingerprint()
    return RunContext(dtype, tokens, plan.recipe.seed, journal, show, processes, adapter, number)


def _make_checkpoint(
    plan: Plan, output: Output, tokens: torch.Tensor, name: str, show: Progress, processes: Processes
) -> None:
    recipe, model = plan.recipe, plan.opened
    dtype = compute_dtype(model.dtype, recipe.calibrate.device)
    processes.broadcast(lambda: ({"tokens": tokens}, None))
    records, worked_on, tokens = _run_steps(plan, output, tokens, show, processes)
    show.say("reloading the checkpoint")
    staged = ModelDirectory("", output.staging, worked_on.directory.trust_remote_code)
    read = _as_read(tokens, records[-1], worked_on.directory, staged)
    outcome = reload(worked_on, output.staging, read, output.journal)
    facts = {
        "versions": versions(),
        "recipe": {**recipe.content(), "model": name},
        "seed": recipe.seed,
        "computed_in": str(dtype).removeprefix("torch."),
        "data": _data(recipe, tokens) if plan.text else None,
        "model": {"name": name, "sha256": model.stored.content_digest(), "bytes": model.weights.nbytes},
        **({} if plan.adapter is None else {"adapter": plan.adapter.facts()}),
        "steps": [
            {
                "step": record.name,
                "settings": record.settings,
                "layers": record.layers,
                "unknown": record.unknown,
                "done": record.done,
                **({} if record.chosen is None else {"chosen": record.chosen}),
                **({} if record.training is None else {"training": record.training}),
            }
            for record in records
        ],
        "reload": outcome.as_data(),
        **Claims(files=digests(output.staging), logits=outcome.logits).data(),
    }
    write_text(output.staging / RECORD, json.dumps(facts, indent=2) + "\n")
    output.publish()


def _run_steps(
    plan: Plan, output: Output, tokens: torch.Tensor, show: Progress, processes: Processes
) -> tuple[list[StepRecord], OpenModel, torch.Tensor]:
    """Run all steps, in every process; the last one's model is in the staging directory.

    Returns:
        The records of steps, without the last one's in processes that write nothing; the model that the last step
        worked on; and the calibration windows as it read them.
    """
    model, records = plan.opened, []
    last = len(plan.steps) - 1
    for number in range(last):
        context = _context(plan, model, output, number, tokens, show, processes)
        records.append(_intermediate(plan, number, model, context))
        before, model = model, _left_by(number, output, model)
        tokens = _as_read(tokens, records[-1], before.directory, model.directory)
    context = _context(plan, model, output, last, tokens, show, processes)
    done = _ready(plan, last, model).run(context, output.staging)
    return [*records, *([] if done is None else [done])], model, tokens


def _ready(plan: Plan, number: int, model: OpenModel) -> PreparedStep:
    """A step, prepared for its actual model: the plan knew only shapes of what earlier steps leave."""
    if number == 0:
        return plan.prepared[0]
    return plan.steps[number].prepare(Given(model, plan.opened, plan.recipe.calibrate.device != "cpu"))


def _data(recipe: Recipe, tokens: torch.Tensor) -> dict[str, Any]:
    """The record of the calibration text."""
    c = recipe.calibrate
    return {"source": c.source, "samples": c.samples, "length": c.length, "sha256": fingerprint(tokens)}


def _intermediate(plan: Plan, number: int, model: OpenModel, context: RunContext) -> StepRecord:
    """Run a step that others follow, unless an earlier run has: its model is kept in the journal."""
    record = context.journal / "record.json"
    _, finished = context.processes.broadcast(lambda: ({}, record.exists()))
    if not finished:
        place = _place(context.journal)
        if context.processes.is_main:
            shutil.rmtree(place, ignore_errors=True)
        done = _ready(plan, number, model).run(context, place)
        if done is not None:
            write_text(record, json.dumps(asdict(done)) + "\n")
    context.processes.wait()
    return StepRecord(**json.loads(record.read_text(encoding="utf-8")))


def _place(journal: Path) -> Path:
    """Where a step's model is kept for the next step."""
    return journal / "model"


def _left_by(number: int, output: Output, before: OpenModel) -> OpenModel:
    place = _place(output.journal / f"step-{number}")
    return OpenModel(ModelDirectory(place.name, place, before.directory.trust_remote_code))


def _as_read(tokens: torch.Tensor, done: StepRecord, before: ModelDirectory, after: ModelDirectory) -> torch.Tensor:
    """The calibration windows as read by a step's resulting model."""
    return recut(tokens, before.tokenizer(), after.tokenizer()) if done.retokenized else tokens


def _evaluate_and_report(plan: Plan, output: Output, name: str, show: Progress) -> RunResult:
    """Measure the checkpoint and the original; an interrupted run leaves a partial report and can continue."""
    subjects = _subjects(plan, output, name, why_not_served(plan))
    settings = plan.recipe.evaluate or Evaluate(samples=0, speed=False)
    title = f"{name} compressed by Smelt"
    drafter = None
    if settings.drafter is not None:
        given, called = settings.drafter, None
        if draft_checkpoint(given) == RESULT:
            given, called = f"{given.removesuffix(RESULT)}{output.checkpoint}", subjects[1].name
        drafter = EvaluatedDrafter.find(given, called=called, trust_remote_code=plan.recipe.trust_remote_code)

    def evaluation(of: list[Subject]) -> Evaluation:
        wanted = bool(plan.recipe.evaluate)
        journal = output.journal / "evaluation"
        return Evaluation(of, settings, plan.tasks, journal, show, title=title, drafter=drafter, wanted=wanted)

    original = plan.opened.directory

    def card(report: ReportData) -> None:
        write_card(report, output.checkpoint, original)
        claim_measured(output.checkpoint, report, plan.recipe.model, merged=plan.adapter is not None)

    try:
        report = measured(evaluation(subjects), output.path, card)
    except NotServed as problem:  # an architecture unknown to the runtime
        report = measured(evaluation(_subjects(plan, output, name, str(problem))), output.path, card)
    output.forget_intermediate()
    return RunResult(output.checkpoint, report)


def why_not_served(plan: Plan) -> str | None:
    """Why the runtime cannot serve the models here; None if it can."""
    if plan.adapter is not None:
        return "the adapter is not in the original's files"
    fits = whole_model_bytes(plan.opened) <= available_memory()
    return None if fits else "the models do not fit in memory at once"


def _subjects(plan: Plan, output: Output, name: str, reason: str | None) -> list[Subject]:
    """The original and the result: served by the runtime, or, for a given reason, read block by block."""
    model = plan.opened
    trust = model.directory.trust_remote_code
    directory = ModelDirectory(output.checkpoint.name, output.checkpoint, trust)
    facts = json.loads((output.checkpoint / RECORD).read_text(encoding="utf-8"))
    called = name if plan.adapter is None else f"{name} with {plan.adapter.directory.name}"
    original = Subject(called, model.directory, "baseline", only_text=reason)
    if plan.adapter is not None:
        original.merged = plan.adapter.fingerprint()
        original.warnings.append(f"its size and layers are those of {name}; the adapter's weights are not counted")
    compressed = Subject(
        ", ".join(step.label for step in plan.steps),
        directory,
        "candidate",
        only_text=reason,
        warnings=_warnings(facts),
    )
    if reason is not None:
        how = f"transformers, block by block in float32, because {reason}"
        original.open_reader = lambda kept: (StreamedModel(model.skeleton, model.weights, torch.float32, kept), how)
        compressed.open_reader = lambda kept: (
            CompressedModel(model if len(plan.steps) == 1 else open_dense(directory), directory).view(
                torch.float32, kept
            ),
            how,
        )
        if plan.recipe.evaluate and (plan.recipe.evaluate.tasks or plan.recipe.evaluate.speed):
            compressed.warnings.append(f"speed, drafts, tasks and samples were not measured, because {reason}")
    return [original, compressed]


def _calibration(plan: Plan, journal: Path, shared: Path | None, show: Progress) -> torch.Tensor:
    """The calibration windows, kept so that an interrupted run continues with the same ones.

    If no step reads text they are a few random ones, for checking the result.
    """
    if not plan.text:
        return random_windows(plan.opened)
    windows = plan.calibration
    kept = journal / "calibration.safetensors"
    if kept.exists():
        return SafetensorsFile(kept).load("tokens")
    if windows is None:
        windows = written_once(plan.recipe, shared or journal, show)
    save_tensors(kept, {"tokens": windows.tokens})
    return windows.tokens


def _warnings(facts: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for number, record in enumerate(facts["steps"]):
        # A layer may have had another name before a step that removed blocks.
        where = f"step {number}, " if len(facts["steps"]) > 1 else ""
        found += [f"{where}{each['name']}: {note}" for each in worst_first(record["layers"]) for note in each["notes"]]
        found += record["unknown"] + record["done"]
    if Reload(**facts["reload"]).through != "transformers":
        found.append(facts["reload"]["sentence"])
    return found
