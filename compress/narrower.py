"""A model of which some units of an axis are left, without a copy on the disk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .axes import Axis, Span
from .open_model import OpenModel
from .safetensors_file import SafetensorsFile, TensorInfo
from .weights import Weights


def narrower(
    model: OpenModel,
    axis: Axis,
    kept: Mapping[str, Tensor] | int,
    changed: Mapping[str, SafetensorsFile] | None = None,
) -> OpenModel:
    """The model with some units only.

    Args:
        model: the whole model.
        axis: what is made smaller.
        kept: which stay, by the linear that reads them, in order; or how many, where only shapes matter.
        changed: files of weights that make up for it, already narrow, by checkpoint name.
    """
    units = kept if isinstance(kept, int) else len(next(iter(kept.values())))
    weights = _FewerUnits(model, axis, kept, units, changed or {})
    return OpenModel(axis.with_units(model.directory, units), weights, is_edited=model.is_edited)


class _FewerUnits:
    """The tensors of a model, those along an axis with some units only."""

    def __init__(
        self,
        model: OpenModel,
        axis: Axis,
        kept: Mapping[str, Tensor] | int,
        units: int,
        changed: Mapping[str, SafetensorsFile],
    ) -> None:
        self._source: Weights = model.weights
        self._whole, self._units, self._changed = axis.units, units, changed
        self._kept = dict.fromkeys(axis.readers, torch.arange(units)) if isinstance(kept, int) else kept
        self._spans: dict[str, tuple[str, Span]] = {
            model.names[name]: (reader, span) for reader, spans in axis.readers.items() for name, span in spans.items()
        }

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        if name not in self._spans:
            return info
        _, span = self._spans[name]
        width = self._units * sum(span.parts)
        return TensorInfo(info.dtype, (*info.shape[: span.dim], width, *info.shape[span.dim + 1 :]))

    @property
    def nbytes(self) -> int:
        return sum(self.info(name).nbytes for name in self.names())

    def load(self, name: str) -> Tensor:
        if name in self._changed:
            return self._changed[name].load(name)
        tensor = self._source.load(name)
        if name not in self._spans:
            return tensor
        reader, span = self._spans[name]
        places = span.places(self._whole, self._kept[reader])
        return tensor.index_select(span.dim, places.to(tensor.device)).contiguous()
