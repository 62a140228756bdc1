"""The structures that can be pruned: by name in a recipe, their settings and step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ...quant.pattern import Pattern
from ...system.errors import nearest_name
from ...system.lazy import later
from ...system.settings.variants import Variants
from ..settings.auto import PruneAuto
from ..settings.base import PruneBase
from ..settings.blocks import PruneBlocks, PruneParts
from ..settings.experts import PruneExperts
from ..settings.hidden import PruneHidden
from ..settings.units import PruneChannels, PruneHeads
from ..settings.vocabulary import PruneVocabulary
from ..settings.weights import PrunePattern, PruneWeights

if TYPE_CHECKING:
    from ...models.steps.step import Step


@dataclass(frozen=True)
class Structure:
    """A kind of structure that can be pruned.

    Attributes:
        settings: the model of the recipe's section.
        step: creates the step, from the settings and the name of the section in messages.
    """

    settings: type[PruneBase]
    step: Callable[[Any, str], Step[Any]]


PATTERN = "N:M"
_step = partial(later, __name__.rpartition(".")[0])

STRUCTURES: Mapping[str, Structure] = {
    "blocks": Structure(PruneBlocks, _step("blocks", "PruneBlocksStep")),
    "attention": Structure(PruneParts, _step("blocks", "PruneBlocksStep")),
    "mlp": Structure(PruneParts, _step("blocks", "PruneBlocksStep")),
    "ffn": Structure(PruneChannels, _step("units", "PruneUnitsStep")),
    "heads": Structure(PruneHeads, _step("units", "PruneUnitsStep")),
    "hidden": Structure(PruneHidden, _step("hidden", "PruneHiddenStep")),
    "experts": Structure(PruneExperts, _step("experts", "PruneExpertsStep")),
    "vocabulary": Structure(PruneVocabulary, _step("vocabulary", "PruneVocabularyStep")),
    "auto": Structure(PruneAuto, _step("auto", "PruneAutoStep")),
    "weights": Structure(PruneWeights, _step("weights", "PruneWeightsStep")),
    PATTERN: Structure(PrunePattern, _step("weights", "PruneWeightsStep")),
}


def structure_named(name: Any) -> str:
    """The row of :data:`STRUCTURES` for a structure's name in a recipe; ValueError if unknown."""
    known = [each for each in STRUCTURES if each != PATTERN]
    if isinstance(name, str) and name in known:
        return name
    try:
        Pattern.named(str(name))
    except ValueError:
        hint = nearest_name(name, known) if isinstance(name, str) else ""
        raise ValueError(f"{name!r} is neither {', '.join(known)} nor a pattern such as 2:4{hint}") from None
    return PATTERN


def _spelled(name: Any) -> Any:
    if isinstance(name, int) and not isinstance(name, bool) and name >= 60:
        return f"{name // 60}:{name % 60}"  # YAML reads 2:4 without quotes as minutes and seconds
    return name


Prune = Annotated[
    PruneBase,
    Variants("structure", {name: each.settings for name, each in STRUCTURES.items()}, structure_named, _spelled),
]


def step_of(settings: PruneBase, where: str) -> Step[Any]:
    """The step that a recipe's section describes.

    Args:
        settings: the section.
        where: how messages name it.
    """
    return STRUCTURES[structure_named(settings.structure)].step(settings, where)
