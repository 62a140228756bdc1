"""The distill step: train the model, as it is now, to predict what a teacher predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ...models.checkpoint.writer import Entry, write_checkpoint
from ...models.steps.step import RunContext, StepRecord
from ...models.structure.open_model import OpenModel
from ...system.errors import Problem
from ...system.machine import human_bytes
from ...system.resources import Cost
from ..settings import Distill
from .checks import teacher_of, training_problems
from .costs import training_cost, training_place
from .student import WholeModel, begin_anew
from .training_run import Outcome, train


class DistillStep:
    """Train a model on a teacher's predictions.

    Args:
        settings: the recipe's section.
        where: how messages name this step.
    """

    quantizes = False
    leaves_zeros = False

    def __init__(self, settings: Distill, where: str) -> None:
        self.settings = settings
        self._where = where
        self.original: OpenModel | None = None  # what the run begins with, once it is known
        self.on_gpu = False  # whether what is trained is in another memory

    @property
    def keeps_zeros(self) -> bool:
        return self.settings.student == "trained"

    @property
    def label(self) -> str:
        return f"{'distilled' if self.settings.has_teacher else 'trained'} by {self.settings.label}"

    @property
    def learns_from_original(self) -> bool:
        """Whether the teacher is the model that the run began with."""
        return self.settings.learns_from_original

    def check(self, model: OpenModel) -> list[Problem]:
        return training_problems(self.settings, model, self._where)

    def reads_text(self, model: OpenModel) -> list[str]:
        return ["distill"]

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        teacher = teacher_of(self.settings, model, self.original)
        return training_cost(self.settings, model, teacher, on_gpu=self.on_gpu)

    def plan(self, model: OpenModel) -> dict[str, Any]:
        settings, nbytes = self.settings, model.weights.nbytes
        return {
            "step": "distill",
            "loss": settings.loss.method if settings.has_teacher else "cross_entropy",
            "tokens": settings.steps * settings.batch * settings.length,
            "steps": settings.steps,
            "bytes_before": nbytes,
            "bytes_after": nbytes,
            "checkpoint_bytes": nbytes,
            "stays_packed": True,
            "sentence": f"train for {settings.steps} steps of {settings.batch} x {settings.length} tokens of"
            f" {settings.data.text().label}"
            + (f", {settings.loss.method} from {_called(settings.teacher)}" if settings.has_teacher else "")
            + f": {human_bytes(nbytes)} as before",
        }

    def outlook(self, model: OpenModel) -> OpenModel:
        return model  # of the same shapes

    def run(self, model: OpenModel, context: RunContext, target: Path) -> StepRecord:
        outcome = self._trained(model, context)
        entries: list[Entry] = []
        by_key = {key: outcome.weights[name] for name, key in model.names.items() if name in outcome.weights}

        def load(key: str) -> Tensor:
            return (by_key[key].cpu() if key in by_key else model.weights.load(key)).to(model.weights.info(key).dtype)

        for key in model.weights.names():
            entries.append((key, model.weights.info(key), lambda key=key: load(key)))
        trust = model.directory.trust_remote_code
        write_checkpoint(target, model.directory.path, model.directory.config_data(), entries, with_code=trust)
        settings = self.settings.model_dump(mode="json")
        return StepRecord("distill", settings, [], [], None, [outcome.sentence], training=outcome.told)

    def help(self, model: OpenModel, context: RunContext) -> None:
        self._trained(model, context)

    def _trained(self, model: OpenModel, context: RunContext) -> Outcome:
        settings, device = self.settings, context.processes.device
        teacher = teacher_of(settings, model, context.original)
        student = WholeModel(OpenModel(model.directory, model.weights), context.dtype, device)
        if settings.student == "random":
            begin_anew(student, context.seed)
        if settings.checkpointing:
            student.keep_less()
        tokenizer = model.directory.tokenizer()
        return train(settings, student, student.trained(), teacher, tokenizer, training_place(context))


def _called(teacher: str) -> str:
    return "the original" if teacher == "original" else teacher
