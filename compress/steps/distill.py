"""The distill step: train the model, as it is now, to predict what a teacher predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ...runtime.machine import human_bytes
from ..checkpoint import Entry, write_checkpoint
from ..errors import Problem, SmeltError
from ..model_directory import find_model
from ..open_model import OpenModel
from ..recipe_training import Distill
from ..resources import Cost, compute_dtype
from ..student import WholeModel, begin_anew
from ..training_run import Outcome, Place, train
from ..training_text import shortage
from .step import RunContext, StepRecord
from .training_cost import training_cost


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

    @property
    def keeps_zeros(self) -> bool:
        return self.settings.student == "trained"

    @property
    def label(self) -> str:
        settings = self.settings
        learned = settings.loss.method if settings.has_teacher else "cross-entropy"
        return f"{'distilled' if settings.has_teacher else 'trained'} by {learned} on {_short(settings.tokens)} tokens"

    @property
    def learns_from_original(self) -> bool:
        """Whether the teacher is the model that the run began with."""
        return self.settings.has_teacher and self.settings.teacher == "original"

    def check(self, model: OpenModel) -> list[Problem]:
        problems: list[Problem] = []
        settings, tokenizer = self.settings, model.directory.tokenizer()
        text = settings.data.text()
        context = model.context()
        if context and settings.length > context:
            what = f"{settings.length} tokens are more than the {context} that the model was made for; use at most that"
            problems.append(Problem(f"{self._where}.length", what))
        try:
            short = text.problem() or shortage(text, tokenizer, settings.length, settings.batch)
            if short is not None:
                problems.append(Problem(f"{self._where}.data", short))
        except SmeltError as error:
            problems.append(Problem(f"{self._where}.data", str(error)))
        if settings.has_teacher and settings.teacher != "original":
            try:
                teacher = self._named_teacher(model)
                if teacher.directory.tokenizer().get_vocab() != tokenizer.get_vocab():
                    problems.append(Problem(f"{self._where}.teacher", self.other_tokens(settings.teacher)))
            except SmeltError as error:
                problems.append(Problem(f"{self._where}.teacher", str(error)))
        return problems

    def other_tokens(self, teacher: str) -> str:
        """Why a teacher with another tokenizer cannot teach."""
        return (
            f"{teacher} has another tokenizer than the student, and a prediction of one's tokens is none of the other's;"
            " choose a teacher with the student's tokenizer, or distill before the vocabulary is pruned"
        )

    def cost(self, model: OpenModel, windows: int, length: int) -> Cost:
        teacher = None
        if self.settings.has_teacher:
            teacher = model if self.learns_from_original else self._named_teacher(model)
        return training_cost(self.settings, model, teacher)

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
        """It is the first process's work alone."""

    def _trained(self, model: OpenModel, context: RunContext) -> Outcome:
        settings, device = self.settings, context.processes.device
        teacher = None
        if settings.has_teacher:
            teacher = context.original if self.learns_from_original else self._named_teacher(model)
        student = WholeModel(OpenModel(model.directory, model.weights), compute_dtype(model.dtype, str(device)), device)
        if settings.student == "random":
            begin_anew(student, context.seed)
        if settings.checkpointing:
            student.keep_less()
        place = Place(
            context.journal,
            context.journal.parent.parent,
            f"step-{context.number}",
            compute_dtype(model.dtype, device.type),
            device,
            context.seed,
            context.progress,
        )
        return train(settings, student, student.trained(), teacher, model.directory.tokenizer(), place)

    def _named_teacher(self, model: OpenModel) -> OpenModel:
        trust = model.directory.trust_remote_code
        return OpenModel(find_model(self.settings.teacher, trust_remote_code=trust))


def _called(teacher: str) -> str:
    return "the original" if teacher == "original" else teacher


def _short(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
