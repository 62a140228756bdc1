"""The drafter that an engine's configuration names."""

from __future__ import annotations

from pathlib import Path

from ....models.directory.find import find_checkpoint
from ....system.errors import RuntimeProblem, SmeltError
from ....system.progress import Log
from ...decoder.model import Model
from ...parallel.stages import RankPlace
from ...speculation.eagle.head_checkpoint import is_head
from ...weights.checkpoint import Checkpoint
from ..setup.config import LOOKUP, NESTED, EngineConfig
from .draft_model import DraftModel
from .draft_weights import DraftWeights
from .loaded_head import LoadedHead


def load_drafter(
    config: EngineConfig, opened: Checkpoint, verifier: Model, place: RankPlace, *, log: Log
) -> DraftWeights | None:
    """Load what a configuration names; None if that has no weights, and on all ranks but the first if this one drafts for all.

    Args:
        config: of the engine.
        opened: the verifier's checkpoint.
        verifier: the model that verifies, or this rank's part of it.
        place: this process' among those that compute the model.
        log: gets messages for the user.

    Raises:
        SmeltError: it cannot be read, or does not fit the verifier.
    """
    named = config.draft_weights
    if named == NESTED:
        return DraftModel.nested(opened, verifier, place, divides_experts=config.enable_expert_parallel, log=log)
    if config.exit_layer is not None:
        return DraftModel.early_exit(verifier, config.exit_layer, log=log)
    if named is None or place.world.rank > 0:
        return None
    path = _checkpoint(named)
    if is_head(path):
        return LoadedHead.load(path, config, opened, verifier, log=log)
    return DraftModel.load(path, config, opened, verifier, log=log)


def _checkpoint(name: str) -> Path:
    """Its directory: a checkpoint's, a run's output, a builtin model or one of the hub."""
    if not (Path(name).is_dir() or name.startswith("builtin:") or "/" in name):
        raise RuntimeProblem(
            f"drafter is {name}; it must be {LOOKUP}, {NESTED}, early-exit:N, a checkpoint's directory or a model's name, or one of"
            f" these after {LOOKUP}+"
        )
    try:
        return find_checkpoint(name).path
    except SmeltError as error:
        raise RuntimeProblem(f"drafter is {name}: {error}") from None
