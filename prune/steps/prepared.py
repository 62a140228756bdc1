"""What the prune steps of all structures prepare, say and record alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from ...models.steps.step import PreparedStep, RecipeStepPlan, Step, StepRecord
from ...models.structure.open_model import OpenModel
from ...system.errors import Problem, ProblemsError
from ...system.hardware.machine import human_bytes
from ..settings.base import PruneBase

Settings = TypeVar("Settings", bound=PruneBase)


class PreparedPrune(PreparedStep, Generic[Settings]):
    """A prune step and its input model.

    Args:
        step: the step.
        model: the model.

    Raises:
        ProblemsError: the structure cannot be removed from the model, or not as much of it.
    """

    def __init__(self, step: Step[Settings], model: OpenModel) -> None:
        self.settings, self.label, self._where, self.model = step.settings, step.label, step.where, model
        self.reads_text: Sequence[str] = [f"prune {step.settings.structure}"]

    def _wrong(self, field: str, what: object) -> ProblemsError:
        return ProblemsError([Problem(f"{self._where}.{field}", str(what))])

    def _wrong_amount(self, what: str) -> ProblemsError:
        settings = self.settings
        return self._wrong(next(name for name in settings.amounts if getattr(settings, name) is not None), what)

    def _planned(
        self, facts: dict[str, Any], what: str, after: OpenModel, more: Mapping[str, Any] | None = None
    ) -> RecipeStepPlan:
        before, left = self.model.weights.nbytes, after.weights.nbytes
        sentence = f"prune {what}: {human_bytes(before)} -> {human_bytes(left)}"
        return RecipeStepPlan(
            "prune", {"structure": self.settings.structure, **facts}, before, left, sentence, more=more or {}
        )

    def _record(
        self, done: list[str], layers: list[dict[str, Any]] | None = None, chosen: dict[str, Any] | None = None
    ) -> StepRecord:
        settings = self.settings.model_dump(mode="json")
        return StepRecord("prune", settings, layers or [], self.model.unknown, chosen, done)
