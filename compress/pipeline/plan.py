"""What can be known of a run before any work: checks, and the cost in memory, disk and time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ...distill.run.checks import other_tokens, writer_problems
from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.find import find_model
from ...models.steps.step import Given, PreparedStep, Step
from ...models.streaming.streamed import LOGIT_TOKENS
from ...models.structure.lora import Adapter, adapted
from ...models.structure.open_model import OpenModel
from ...models.text.text_source import TextSource
from ...models.text.windows import Windows, calibration_windows, evaluation_windows
from ...quant.stored.compressed import open_dense
from ...system.errors import Problem, ProblemsError, SmeltError
from ...system.hardware.machine import available_memory, human_bytes
from ...system.hardware.resources import Cost, compute_dtype, free_disk, human_time, matmul_rate
from ...system.storage.activation_store import BATCH_TOKENS
from ...system.storage.digests import digest, named_files
from ...system.storage.run_directory import Output
from ...system.versions import versions
from ..evaluation.problems import (
    device_problems,
    find_tasks,
    length_problems,
    settings_problems,
    task_problems,
    text_problems,
)
from ..evaluation.scoring.tasks import Tasks
from ..evaluation.speed import LIBRARIES, WIDER
from ..loaders.facts import facts_of_plan
from ..loaders.rules import loaders
from ..recipe.recipe import Recipe
from ..results.result import Loader
from .build import steps_of
from .self_text import writing_cost
from .verify import reload_bytes

# Work not covered by operation counts, measured on two cores (benchmarks/quantization/memory_limit.py compares).
_SECONDS_PER_LINEAR = 0.02
_SECONDS_PER_SEQUENTIAL_COLUMN = 1.2e-4
# Memory of torch's threads and lazily imported modules, for any model.
_WARM_UP_BYTES = 200_000_000


@dataclass(frozen=True)
class Plan:
    """A recipe checked against its model and this machine.

    Attributes:
        recipe: the recipe, with unset lengths fitted to the model.
        model: the opened model; None if it could not be opened.
        steps: its steps.
        problems: everything that would make the run fail; empty if it may start.
        cost: peak memory, total disk and total operations.
        adapter: the adapter that is merged into the model, if any.
        calibration: the calibration windows, if they come from a text.
        tasks: lm-eval's tasks to evaluate on, if any.
        prepared: the steps, prepared for the shapes they will work on; for a recipe with problems, those before the
            first that has one.
        text: the settings that need calibration text, by step; none is read if empty.
    """

    recipe: Recipe
    model: OpenModel | None
    steps: list[Step[Any]]
    problems: list[Problem]
    cost: Cost
    adapter: Adapter | None = None
    calibration: Windows | None = None
    tasks: Tasks | None = None
    prepared: list[PreparedStep] = field(default_factory=list)
    text: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def make(cls, recipe: Recipe, *, fresh: bool = False, processes: int = 1, shards: int = 1) -> Plan:
        """Check a recipe. Reads headers, and weights only to compare them with those of a run that has begun; writes nothing.

        Args:
            recipe: what to do.
            fresh: whether an earlier run in the output may be replaced.
            processes: number of processes on this machine.
            shards: number of processes over which trained weights are sharded.
        """
        steps = steps_of(recipe)
        problems = _text_problems(recipe)
        misplaced = _order_problems(steps)
        problems += misplaced
        try:
            model, adapter = _opened(recipe)
        except ProblemsError as error:
            return cls(recipe, None, steps, [*error.problems, *problems], Cost(0, 0, 0.0))
        recipe = recipe.within(model.context())
        # It reads all of the model, which is of no use where there is nothing to compare it with.
        compares = not fresh and Output.was_begun(Path(recipe.output))
        identity = run_identity(recipe, steps, model, adapter) if compares else {}
        output = Output(Path(recipe.output), identity, fresh=fresh, reads=recipe.content())
        blocked = output.problem()
        if blocked:
            problems.append(Problem("output", blocked))
        on_gpu = recipe.calibrate.device != "cpu"
        prepared, wrong = _prepared(steps if not misplaced else steps[:1], model, on_gpu)
        problems += wrong or _teacher_problems(prepared, model)
        cost = Cost(0, 0, 0.0)
        calibration = tasks = None
        text: dict[int, list[str]] = {}
        if not problems:
            problems += _length_problems(recipe, model, processes)
            text = {number: list(step.reads_text) for number, step in enumerate(prepared) if step.reads_text}
            writes = bool(text) and recipe.calibrate.source == "self"
            unable = writer_problems(model, "the model", "calibrate.source") if writes else []
            problems += unable
            writes = writes and not unable
            cost = _total_cost(recipe, model, prepared, processes, shards, writes_text=writes)
            if not output.is_complete or fresh:
                problems += _resource_problems(recipe, model, cost, reads_text=bool(text))
                try:
                    calibration = _read_windows(recipe, model, calibrate=bool(text))
                    tasks = find_tasks(recipe.evaluate) if recipe.evaluate else None
                    if tasks is not None and recipe.evaluate:
                        problems += task_problems(recipe.evaluate, tasks, [model.directory])
                except SmeltError as error:
                    problems += [Problem("data", line) for line in str(error).split("\n")]
        return cls(recipe, model, steps, problems, cost, adapter, calibration, tasks, prepared, text)

    @property
    def opened(self) -> OpenModel:
        """The model, of a plan that got as far."""
        assert self.model is not None
        return self.model

    def as_data(self) -> dict[str, Any]:
        """The plan as plain data."""
        data: dict[str, Any] = {"model": self.recipe.model, "output": self.recipe.output}
        if self.model is not None:
            data |= {
                "architecture": self.model.architecture,
                "blocks": len(self.model.anatomy.blocks),
                "bytes": self.model.weights.nbytes,
                "unknown": self.model.unknown,
            }
            if not self.problems:
                held = psutil.Process().memory_info().rss
                data |= {
                    "steps": [step.plan().as_data() for step in self.prepared],
                    "loaders": [loader.model_dump() for loader in self.loaders()],
                    "text": self._text(),
                    "predicted": {
                        "peak_memory_bytes": held + self.cost.memory,
                        "memory_above_start_bytes": self.cost.memory,
                        "disk_bytes": self.cost.disk,
                        "seconds": self.seconds(),
                        "served_memory_bytes": self._served_bytes(),
                    },
                    "available": {
                        "memory_bytes": available_memory(),
                        "disk_bytes": free_disk(Path(self.recipe.output)),
                    },
                }
        data["problems"] = [str(problem) for problem in self.problems]
        return data

    def loaders(self) -> list[Loader]:
        """Which other programs will load the result; for a recipe without problems."""
        return loaders(facts_of_plan(self.opened.directory.path, self.prepared[-1]))

    def seconds(self) -> float:
        """A rough estimate of the time, from a matrix product timed now."""
        linears = len(self.model.linears) if self.model else 0
        fixed = linears * _SECONDS_PER_LINEAR + self.cost.sequential * _SECONDS_PER_SEQUENTIAL_COLUMN + 2.0
        return self.cost.operations / matmul_rate() + fixed

    def _served_bytes(self) -> int:
        """Memory of the processes that serve the model and the result, whose speed is measured in turns; 0 if nothing is served."""
        asked = self.recipe.evaluate
        if not asked or not (asked.tasks or asked.samples or asked.speed) or self.adapter is not None:
            return 0
        both = self.opened.weights.nbytes, self.prepared[-1].plan().checkpoint_bytes
        return int(sum(WIDER * each + LIBRARIES for each in both))

    def terminal(self) -> str:
        """The plan as plain text."""
        data = self.as_data()
        lines = [f"model:   {data['model']}"]
        if self.model is not None:
            lines[0] += f" ({data['architecture']}, {data['blocks']} blocks, {human_bytes(data['bytes'])})"
        lines.append(f"output:  {data['output']}")
        lines += [f"step {number}:  {step['sentence']}" for number, step in enumerate(data.get("steps", []))]
        if "text" in data:
            lines.append(f"text:    {data['text']}")
        if "predicted" in data:
            predicted, free = data["predicted"], data["available"]
            lines += [
                f"memory:  about {human_bytes(predicted['peak_memory_bytes'])} at the peak"
                f" ({human_bytes(predicted['memory_above_start_bytes'])} above the start; {human_bytes(free['memory_bytes'])} available)",
                f"disk:    about {human_bytes(predicted['disk_bytes'])} ({human_bytes(free['disk_bytes'])} free)",
                f"time:    roughly {human_time(predicted['seconds'])}",
            ]
            if predicted["served_memory_bytes"]:
                assert self.recipe.evaluate
                names = [name for name in ("tasks", "samples", "speed") if getattr(self.recipe.evaluate, name)]
                asked = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
                served = human_bytes(predicted["served_memory_bytes"])
                lines[-1] += f", without {asked}"
                lines.append(f"serving: about {served} of memory for {asked}; models take turns if less is available")
        lines += [f"loads:   {Loader.model_validate(each).sentence}" for each in data.get("loaders", [])]
        lines += [f"note:    {sentence}" for sentence in data.get("unknown", [])]
        if self.problems:
            lines += ["", f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}:"]
            lines += [f"  {problem}" for problem in self.problems]
        else:
            lines += ["", "no problems found"]
        return "\n".join(lines)

    def _text(self) -> str:
        """Whether and why calibration text is read, as a sentence."""
        if not self.text:
            return "no calibration text is needed"
        several = len(self.steps) > 1
        why = [
            f"step {number}: {', '.join(reasons)}" if several else ", ".join(reasons)
            for number, reasons in self.text.items()
        ]
        c = self.recipe.calibrate
        return f"{c.samples} x {c.length} tokens of calibration text are read ({'; '.join(why)})"


def run_identity(
    recipe: Recipe, steps: Sequence[Step[Any]], model: OpenModel, adapter: Adapter | None
) -> dict[str, Any]:
    """Everything that determines a run's bytes: versions, the recipe, the model and the adapter."""
    return {
        **_named_teachers(recipe, steps),
        **({} if adapter is None else {"adapter": adapter.fingerprint()}),
        "versions": versions(),
        "recipe": recipe.content(),
        "model": model.stored.content_digest(),
        "config": digest(model.directory.config_data()),
        "tokenizer and other files": model.directory.companions(),
        "files": named_files(recipe.content()),
        "computed_in": str(compute_dtype(model.dtype, recipe.calibrate.device)),
    }


def _named_teachers(recipe: Recipe, steps: Sequence[Step[Any]]) -> dict[str, Any]:
    """Identities of teachers other than the run's own model; missing ones are reported elsewhere."""
    found: dict[str, str] = {}
    for step in steps:
        if step.training is not None and step.training.teacher is not None:
            teacher = step.training.teacher
            with suppress(SmeltError):
                path = find_model(teacher, trust_remote_code=recipe.trust_remote_code).path
                found[teacher] = CheckpointWeights(path).content_digest()
    return {"teachers": found} if found else {}


def calibration_source(recipe: Recipe) -> TextSource:
    """Where a recipe's calibration text comes from."""
    c = recipe.calibrate
    return TextSource(c.source, "calibration", c.field, c.split, c.config)


def _opened(recipe: Recipe) -> tuple[OpenModel, Adapter | None]:
    """The recipe's model, with its adapter.

    Raises:
        ProblemsError: one of them cannot be opened.
    """
    where = "model"
    try:
        found = find_model(recipe.model, revision=recipe.revision, trust_remote_code=recipe.trust_remote_code)
        if recipe.adapter is None:
            return OpenModel(found), None
        model = open_dense(found)
        where = "adapter"
        adapter = Adapter(Path(recipe.adapter))
        return adapted(model, adapter), adapter
    except SmeltError as error:
        raise ProblemsError([Problem(where, line) for line in str(error).split("\n")]) from None


def _total_cost(
    recipe: Recipe, model: OpenModel, prepared: list[PreparedStep], processes: int, shards: int, *, writes_text: bool
) -> Cost:
    """Cost of all steps and of what follows them, which only the first process does."""
    cost, shared = Cost(0, 0, 0.0), 0
    for step in prepared:
        alone = step.cost(recipe.calibrate.samples, recipe.calibrate.length)
        shared = max(shared, processes * alone.of_each(shards))
        cost += alone if processes == 1 else replace(alone, memory=alone.of_each(shards))
    if recipe.evaluate:
        cost += _evaluation_cost(recipe, model)
    reloading = _reload_bytes(prepared[-1])
    if reloading <= available_memory():
        cost += Cost(reloading, 0, 0.0)
    if writes_text:
        cost += writing_cost(model, recipe.calibrate)
    memory = max(shared, cost.memory) + processes * _WARM_UP_BYTES
    return replace(cost, memory=memory, disk=cost.disk + (cost.collected if processes > 1 else 0))


def _order_problems(steps: list[Step[Any]]) -> list[Problem]:
    """Steps in an impossible order."""
    for number, (before, step) in enumerate(itertools.pairwise(steps), 1):
        if before.quantizes and step.quantizes:
            what = "a model that is quantized already cannot be quantized again; keep one quantize step"
            return [Problem(f"steps.{number}", what)]
        if before.quantizes:
            what = "quantized weights cannot be changed without quantizing them again; put quantize last"
            return [Problem(f"steps.{number}", what)]
    zeros = next((number for number, step in enumerate(steps) if step.leaves_zeros), len(steps))
    for number, step in enumerate(steps[zeros + 1 :], zeros + 1):
        if step.changes_zeros is not None:
            what = f"changes all weights, so the zeros of steps.{zeros} would be lost ({step.changes_zeros})"
            return [Problem(f"steps.{number}", f"{what}; remove it, or put it before the pruning")]
    return []


def _prepared(steps: list[Step[Any]], model: OpenModel, on_gpu: bool) -> tuple[list[PreparedStep], list[Problem]]:
    """Each step prepared for the result of those before it, and the problems of the first that cannot be."""
    found: list[PreparedStep] = []
    given = model
    for number, step in enumerate(steps):
        try:
            found.append(step.prepare(Given(given, model, on_gpu)))
        except ProblemsError as error:
            return found, error.problems
        given = found[number].output
    return found, []


def _teacher_problems(steps: list[PreparedStep], original: OpenModel) -> list[Problem]:
    """Trainings whose tokens no longer match those of the original that teaches."""
    return [
        Problem(f"steps.{number}", other_tokens("the original"))
        for number, step in enumerate(steps)
        if step.learns_from_original and step.model.vocabulary() != original.vocabulary()
    ]


def _text_problems(recipe: Recipe) -> list[Problem]:
    problems = []
    if recipe.calibrate.source != "self" and (sentence := calibration_source(recipe).problem()):
        problems.append(Problem("calibrate.source", sentence))
    if recipe.evaluate:
        problems += text_problems(recipe.evaluate)
    return problems


def _read_windows(recipe: Recipe, model: OpenModel, *, calibrate: bool) -> Windows | None:
    """The calibration windows (None if unused, or self-generated); the evaluation's are checked too."""
    read: dict[str, Windows] = {}
    calibrate = calibrate and recipe.calibrate.source != "self"
    if not calibrate and not recipe.evaluate:
        model.directory.check_tokenizer_files()  # they are copied to the checkpoint, where damage would show late
        return None
    tokenizer = model.directory.tokenizer()
    if calibrate:
        c = recipe.calibrate
        read["calibration"] = calibration_windows(
            calibration_source(recipe), tokenizer, c.samples, c.length, recipe.seed
        )
    if recipe.evaluate:
        e = recipe.evaluate
        read["evaluation"] = evaluation_windows(e.source(), tokenizer, e.windows, e.length)
    for windows in read.values():
        if windows.tokens.max().item() >= model.vocabulary():
            raise SmeltError(
                f"{model.directory.path}: its tokenizer produces token id {windows.tokens.max().item()}, but the model has only"
                f" {model.vocabulary()} tokens; the tokenizer belongs to another model"
            )
    return read.get("calibration")


def _length_problems(recipe: Recipe, model: OpenModel, processes: int) -> list[Problem]:
    context, length = model.context(), recipe.calibrate.length
    problems = device_problems(recipe.calibrate.device, "calibrate.")
    if recipe.evaluate:
        problems += settings_problems(recipe.evaluate, processes=processes)
        problems += length_problems(recipe.evaluate, [model.directory])
    if context and length > context:
        sentence = f"{length} tokens exceed the model's context length; use at most {context}"
        problems.append(Problem("calibrate.length", sentence))
    return problems


def _reload_bytes(last: PreparedStep) -> int:
    planned = last.plan()
    return reload_bytes(last.model, planned.checkpoint_bytes if planned.stays_packed else None)


def _evaluation_cost(recipe: Recipe, model: OpenModel) -> Cost:
    assert recipe.evaluate
    tokens = recipe.evaluate.windows * recipe.evaluate.length
    numel = sum(model.block_numels)
    head = model.vocabulary() * model.skeleton.hidden_size
    widest = max(facts.rows for facts in model.block_linears)
    passing = max(BATCH_TOKENS, recipe.evaluate.length) * 4 * widest * 4
    logits = max(LOGIT_TOKENS, recipe.evaluate.length) * model.vocabulary() * 4 * 4
    memory = max(model.largest_block() * 4 + passing, 2 * model.embedding_bytes() + logits)
    hidden = 2 * tokens * model.skeleton.hidden_size * 4
    return Cost(int(memory), hidden, 4 * tokens * (numel + head))


def _held(output: Path) -> int:
    """Bytes of an output directory's files."""
    found = 0
    for path in output.rglob("*"):
        with suppress(OSError):  # another run may be working there, which is refused later
            found += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return found


def _resource_problems(recipe: Recipe, model: OpenModel, cost: Cost, *, reads_text: bool) -> list[Problem]:
    problems = []
    memory = available_memory()
    # What an interrupted run has written is not written again, and what --fresh removes gives room.
    disk = free_disk(Path(recipe.output)) + _held(Path(recipe.output))
    written = reads_text and recipe.calibrate.source == "self"
    if written and recipe.adapter is not None:
        problems.append(
            Problem("calibrate.source", "self would generate text without the adapter; give a text instead")
        )
    if written and recipe.calibrate.device == "cpu" and model.weights.nbytes > memory:
        problems.append(
            Problem(
                "calibrate.source",
                f"self needs the whole model in memory ({human_bytes(model.weights.nbytes)}; {human_bytes(memory)}"
                " available); give a text instead",
            )
        )
    if cost.memory > memory:
        problems.append(
            Problem(
                "memory",
                f"the run needs about {human_bytes(cost.memory)} more memory and {human_bytes(memory)} is available;"
                f" {'lower calibrate.samples or ' if reads_text else ''}use a larger machine",
            )
        )
    if cost.disk > disk:
        problems.append(
            Problem(
                "output",
                f"the run writes about {human_bytes(cost.disk)} and {human_bytes(disk)} is free; free some or choose another output",
            )
        )
    return problems
