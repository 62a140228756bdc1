"""What a recipe's steps do. The pipeline knows only the Step protocol."""

from __future__ import annotations

from ..recipe import StepEntry
from .distill import DistillStep
from .prune_auto import PruneAutoStep
from .prune_blocks import PruneBlocksStep
from .prune_experts import PruneExpertsStep
from .prune_hidden import PruneHiddenStep
from .prune_units import AXES, PruneUnitsStep
from .prune_vocabulary import PruneVocabularyStep
from .prune_weights import PruneWeightsStep
from .quantize import QuantizeStep
from .step import RunContext, Step, StepRecord


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
