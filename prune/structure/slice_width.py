"""A model with only some units of an axis, without a copy on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...models.checkpoint.weights import ChangedWeights
from ...models.structure.open_model import OpenModel
from ...system.storage.tensor_files import SafetensorsFile, TensorInfo
from .axes import Axis, Span


def slice_width(
    model: OpenModel,
    axis: Axis,
    kept: Mapping[str, Tensor] | Sequence[int] | int,
    changed: Mapping[str, SafetensorsFile] | None = None,
) -> OpenModel:
    """The model with only some units.

    If all blocks keep the same number, it is a plain Hugging Face model; otherwise ``layer_sizes`` in ``config.json``
    gives the sizes of each.

    Args:
        model: the whole model.
        axis: the axis to make smaller.
        kept: those to keep, by the linear that reads them, in order; or, if only shapes matter, their number, by block
            if they differ.
        changed: files of refitted weights, already narrow, by checkpoint name.
    """
    if isinstance(kept, int):
        kept = dict.fromkeys(axis.readers, torch.arange(kept))
    elif not isinstance(kept, Mapping):
        kept = {reader: torch.arange(units) for reader, units in by_reader(model, axis, kept).items()}
    weights = _FewerUnits(model, axis, kept, changed or {})
    units = {len(each) for each in kept.values()}
    if len(units) == 1:
        directory = axis.with_units(model.directory, units.pop())
    else:
        directory = axis.with_units_of_blocks(model.directory, units_of_blocks(model, axis, kept))
    return OpenModel(directory, weights, is_edited=model.is_edited)


def by_reader(model: OpenModel, axis: Axis, units: Sequence[int]) -> dict[str, int]:
    """How many units each reader has, given how many each block has."""
    return {
        reader: count
        for block, count in zip(model.anatomy.blocks, units, strict=True)
        for reader in axis.of_block(block.name)
    }


def units_of_blocks(model: OpenModel, axis: Axis, kept: Mapping[str, Tensor]) -> list[int]:
    """How many units each block keeps; a block without a reader counts as keeping all."""
    found = []
    for block in model.anatomy.blocks:
        counts = {len(kept[reader]) for reader in axis.of_block(block.name)} or {axis.units}
        assert len(counts) == 1, f"readers of {block.name} keep different numbers of {axis.noun}"
        found.append(counts.pop())
    return found


def matrices_of_units(model: OpenModel, axis: Axis, reader: str) -> list[Tensor]:
    """Each unit's part, ``[units, …]``, of every matrix that writes the units of a reader, and of the reader."""
    matrices = []
    for name, span in axis.readers[reader].items():
        tensor = model.weights.load(model.names[name])
        if tensor.dim() > 1:
            first = 0
            for size in span.parts:
                part = tensor.narrow(span.dim, first, axis.units * size).movedim(span.dim, 0)
                matrices.append(part.reshape(axis.units, -1))
                first += axis.units * size
    return matrices


class _FewerUnits(ChangedWeights):
    """The tensors of a model, those along an axis with only some units."""

    def __init__(
        self,
        model: OpenModel,
        axis: Axis,
        kept: Mapping[str, Tensor],
        changed: Mapping[str, SafetensorsFile],
    ) -> None:
        super().__init__(model.weights)
        self._whole, self._kept, self._changed = axis.units, kept, changed
        self._spans: dict[str, tuple[str, Span]] = {
            model.names[name]: (reader, span) for reader, spans in axis.readers.items() for name, span in spans.items()
        }

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        if name not in self._spans:
            return info
        reader, span = self._spans[name]
        width = len(self._kept[reader]) * sum(span.parts)
        return TensorInfo(info.dtype, (*info.shape[: span.dim], width, *info.shape[span.dim + 1 :]))

    def load(self, name: str) -> Tensor:
        if name in self._changed:
            return self._changed[name].load(name)
        tensor = self._source.load(name)
        if name not in self._spans:
            return tensor
        reader, span = self._spans[name]
        places = span.places(self._whole, self._kept[reader])
        return tensor.index_select(span.dim, places.to(tensor.device)).contiguous()
