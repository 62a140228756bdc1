"""A model without some of its blocks, without a copy on disk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ...models.checkpoint.weights import ChangedWeights
from ...models.directory.directory import ModelDirectory
from ...models.directory.layer_sizes import LAYER_SIZES, config_fields
from ...models.structure.open_model import OpenModel
from ...models.structure.skeleton import Skeleton
from ...system.errors import SmeltError
from ...system.storage.tensor_files import TensorInfo
from ..update.merge import merged

# Field of config.json: the remaining parts of each block, if parts were removed (removable.py).
LAYER_PARTS = "layer_parts"
# A tensor's checkpoint name: the prefix, its block's number, and the rest.
_NUMBERED = re.compile(r"^(?P<start>(?:[^\d.][^.]*\.)*)(?P<block>\d+)(?P<rest>\..+)$")


def drop_blocks(model: OpenModel, removed: Iterable[int], *, merging: bool = False) -> OpenModel:
    """The model without some blocks; its weights are read from the original files.

    Args:
        model: the whole model.
        removed: numbers of the blocks to remove.
        merging: whether removed blocks are merged into the kept one before them; see :func:`merged`.

    Raises:
        SmeltError: nothing would be left, or the architecture's ``config.json`` cannot express which blocks remain.
    """
    gone, depth = set(removed), len(model.anatomy.blocks)
    kept = [index for index in range(depth) if index not in gone]
    if not kept:
        raise SmeltError(f"all {depth} blocks would be removed; leave at least one")
    if merging:
        _check_merging(model, kept)
    weights = _FewerBlocks(model, kept, merging=merging)
    directory = model.directory.changed(_config_changes(model, kept))
    moved = _becomes_another(model, directory, kept)
    if moved is not None:
        raise SmeltError(
            f"{model.architecture}: block {moved} would move to where config.json makes blocks of another"
            " kind; remove a multiple of its pattern's period"
        )
    return OpenModel(directory, weights, is_edited=model.is_edited)


def can_lose(model: OpenModel, removed: Iterable[int]) -> bool:
    """Whether ``config.json`` can express the model without some blocks."""
    gone = set(removed)
    kept = [index for index in range(len(model.anatomy.blocks)) if index not in gone]
    directory = model.directory.changed(_config_changes(model, kept))
    return _becomes_another(model, directory, kept) is None


def _becomes_another(model: OpenModel, directory: ModelDirectory, kept: list[int]) -> int | None:
    """The first block that would be of another kind in the smaller model; None if there is none."""
    skeleton = Skeleton.of(directory)
    for number, index in enumerate(kept):
        if _traits(skeleton.blocks[number]) != _traits(model.skeleton.blocks[index]):
            return index
    return None


def _check_merging(model: OpenModel, kept: list[int]) -> None:
    """Check that blocks have the same tensors and parts as those merged into them."""
    parts = getattr(model.config, LAYER_PARTS, None)
    if parts is not None and len(set(parts)) > 1:
        raise SmeltError(
            "parts of some blocks were removed, and merging would bring them back; remove update: merge, or merge first"
        )
    for index in kept:
        for other in _behind(index, kept, len(model.anatomy.blocks)):
            if model.block_shape(index) != model.block_shape(other):
                raise SmeltError(
                    f"{model.architecture}: block {index} cannot be merged with block {other}, which has other"
                    " tensors; remove update: merge"
                )


def _config_changes(model: OpenModel, kept: list[int]) -> dict[str, Any]:
    """The number of blocks, and every list that has an entry for each."""
    depth, config = len(model.anatomy.blocks), model.config
    field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    stored = config.to_dict()
    if stored.get(field) != depth:
        raise SmeltError(
            f"{model.architecture}: config.json does not give the number of blocks as {field},"
            " so Smelt cannot make it smaller"
        )
    changes: dict[str, Any] = {field: len(kept)}
    if "num_hidden_layers" in model.directory.config_data():  # some use its other name
        changes["num_hidden_layers"] = len(kept)
    for name, value in stored.items():
        if isinstance(value, list) and len(value) == depth and "token_id" not in name:
            changes[name] = [value[index] for index in kept]
    if changes.get(LAYER_SIZES):  # the remaining blocks may be alike
        changes |= config_fields(changes[LAYER_SIZES])
    return changes


def _traits(block: nn.Module) -> list[Any]:
    """The kind of a block: its modules' classes and settings, but not its index."""
    found: list[Any] = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and "layer_i" not in key
        }
        shapes = {key: parameter.shape for key, parameter in module.named_parameters(recurse=False)}
        found.append((name, type(module), settings, shapes))
    return found


class _FewerBlocks(ChangedWeights):
    """The tensors of the kept blocks, renumbered, and all outside of blocks."""

    def __init__(self, model: OpenModel, kept: list[int], *, merging: bool) -> None:
        super().__init__(model.weights)
        self._old: dict[str, str] = {}
        self._folded: dict[str, list[str]] = {}
        starts = {
            match["start"]
            for name, key in model.names.items()
            if name.startswith(f"{model.skeleton.blocks_name}.") and (match := _NUMBERED.match(key))
        }
        new_number = {index: number for number, index in enumerate(kept)}
        behind = {index: _behind(index, kept, len(model.anatomy.blocks)) if merging else [] for index in kept}
        for key in model.weights.names():
            match = _NUMBERED.match(key)
            if match is None or match["start"] not in starts:
                self._old[key] = key
                continue
            index = int(match["block"])
            if index in new_number:
                new = f"{match['start']}{new_number[index]}{match['rest']}"
                self._old[new] = key
                others = [f"{match['start']}{other}{match['rest']}" for other in behind[index]]
                self._folded[new] = others

    def names(self) -> list[str]:
        return list(self._old)

    def info(self, name: str) -> TensorInfo:
        return self._source.info(self._old[name])

    def load(self, name: str) -> Tensor:
        tensor, others = self._source.load(self._old[name]), self._folded.get(name, [])
        if not others or not tensor.is_floating_point():
            return tensor
        return merged(tensor, (self._source.load(other) for other in others)).to(tensor.dtype)


def _behind(index: int, kept: list[int], depth: int) -> list[int]:
    """The removed blocks between this one and the next kept one."""
    following = next((other for other in kept if other > index), depth)
    return list(range(index + 1, following))
