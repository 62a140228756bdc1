"""The step that a recipe entry describes."""

from __future__ import annotations

from ...distill.run.step import DistillStep
from ...models.steps.step import RunContext, Step, StepRecord
from ...prune.steps.auto import PruneAutoStep
from ...prune.steps.blocks import PruneBlocksStep
from ...prune.steps.experts import PruneExpertsStep
from ...prune.steps.hidden import PruneHiddenStep
from ...prune.steps.units import AXES, PruneUnitsStep
from ...prune.steps.vocabulary import PruneVocabularyStep
from ...prune.steps.weights import PruneWeightsStep
from ..recipe.recipe import StepEntry
from ..steps.quantize import QuantizeStep


def build(entry: StepEntry, number: int) -> Step:
    """The step that a recipe entry describes."""
    if entry.prune is not None:
        kinds = {
            **dict.fromkeys(("blocks", "attention", "mlp"), PruneBlocksStep),
            "experts": PruneExpertsStep,
            "hidden": PruneHiddenStep,
            "vocabulary": PruneVocabularyStep,
            "auto": PruneAutoStep,
            **dict.fromkeys(AXES, PruneUnitsStep),
        }
        kind = kinds.get(entry.prune.structure, PruneWeightsStep)
        return kind(entry.prune, f"steps.{number}.prune")
    if entry.distill is not None:
        return DistillStep(entry.distill, f"steps.{number}.distill")
    assert entry.quantize is not None
    return QuantizeStep(entry.quantize, f"steps.{number}.quantize")


__all__ = ["DistillStep", "QuantizeStep", "RunContext", "Step", "StepRecord", "build"]
