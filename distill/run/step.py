"""The distill step: train the current model on a teacher's predictions."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ...models.checkpoint.writer import Entry, write_checkpoint
from ...models.steps.step import Given, PreparedStep, RecipeStepPlan, RunContext, Step, StepRecord, StepTraining
from ...models.structure.open_model import OpenModel
from ...system.errors import raise_problems
from ...system.hardware.machine import human_bytes
from ...system.hardware.resources import Cost
from ..settings import Distill
from .checks import step_training, teacher_of, training_problems
from .student import WholeModel, begin_anew
from .training_cost import training_cost, training_place
from .training_run import Outcome, train


class DistillStep(Step[Distill]):
    """Train a model on a teacher's predictions."""

    @property
    def changes_zeros(self) -> str | None:
        return "student: random" if self.settings.student == "random" else None

    @property
    def training(self) -> StepTraining:
        return step_training(self.settings, self.where)

    @property
    def label(self) -> str:
        return f"{'distilled' if self.settings.has_teacher else 'trained'} by {self.settings.label}"

    def prepare(self, given: Given) -> PreparedDistill:
        raise_problems(training_problems(self.settings, given.model, self.where))
        return PreparedDistill(self.settings, given)


class PreparedDistill(PreparedStep):
    """Training one model.

    Args:
        settings: the recipe's section.
        given: the model, and the one that the run started from, which may teach it.
    """

    reads_text = ("distill",)

    def __init__(self, settings: Distill, given: Given) -> None:
        self.settings, self._given, self.model = settings, given, given.model
        self.learns_from_original = settings.learns_from_original
        self.output = given.model  # of the same shapes

    def cost(self, windows: int, length: int) -> Cost:
        teacher = teacher_of(self.settings, self.model, self._given.original)
        return training_cost(self.settings, self.model, teacher, on_gpu=self._given.on_gpu)

    def plan(self) -> RecipeStepPlan:
        settings, nbytes = self.settings, self.model.weights.nbytes
        facts = {
            "loss": settings.loss.method if settings.has_teacher else "cross_entropy",
            "tokens": settings.steps * settings.batch * settings.length,
            "steps": settings.steps,
        }
        sentence = (
            f"train for {settings.steps} steps of {settings.batch} x {settings.length} tokens of"
            f" {settings.data.text().label}"
            + (f", {settings.loss.method} from {_called(settings.teacher)}" if settings.has_teacher else "")
            + f": {human_bytes(nbytes)} as before"
        )
        return RecipeStepPlan("distill", facts, nbytes, nbytes, sentence)

    def run(self, context: RunContext, target: Path) -> StepRecord | None:
        model, outcome = self.model, self._trained(context)
        if not context.processes.is_main:
            return None
        entries: list[Entry] = []
        by_key = {key: outcome.weights[name] for name, key in model.names.items() if name in outcome.weights}

        def load(key: str) -> Tensor:
            return (by_key[key].cpu() if key in by_key else model.weights.load(key)).to(model.weights.info(key).dtype)

        for key in model.weights.names():
            entries.append((key, model.weights.info(key), lambda key=key: load(key)))
        trust = model.directory.trust_remote_code
        write_checkpoint(target, model.directory.path, model.directory.config_data(), entries, with_code=trust)
        settings = self.settings.model_dump(mode="json")
        return StepRecord("distill", settings, [], [], None, outcome.sentences, training=outcome.training)

    def _trained(self, context: RunContext) -> Outcome:
        settings, model, device = self.settings, self.model, context.processes.device
        teacher = teacher_of(settings, model, self._given.original)
        student = WholeModel(OpenModel(model.directory, model.weights), context.dtype, device)
        if settings.student == "random":
            begin_anew(student, context.seed)
        if settings.checkpointing:
            student.checkpoint_activations()
        tokenizer = model.directory.tokenizer()
        return train(settings, student, student.trained(), teacher, tokenizer, training_place(context))


def _called(teacher: str) -> str:
    return "the original" if teacher == "original" else teacher
