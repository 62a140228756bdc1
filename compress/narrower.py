"""A model whose feed-forward layers have fewer channels, without a copy on the disk.

What depends on their number is seen, not known: two skeletons are built on the meta device, one of them a little
narrower, and their parameters' shapes compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import SmeltError
from .model_directory import ModelDirectory
from .open_model import OpenModel
from .safetensors_file import SafetensorsFile, TensorInfo
from .skeleton import Skeleton
from .weights import Weights

# What configurations call the number of a feed-forward layer's channels.
_NAMES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_LESS = 16


@dataclass(frozen=True)
class FeedForward:
    """Where the channels of feed-forward layers are.

    Attributes:
        field: what ``config.json`` calls their number.
        width: how many there are.
        parameters: by full name: the dimension that they lie in, and how many times one after another
            (twice where gate and up are one matrix).
        reader: within a block, the linear whose columns they are.
    """

    field: str
    width: int
    parameters: dict[str, tuple[int, int]]
    reader: str

    @classmethod
    def find(cls, model: OpenModel) -> FeedForward:
        """Find them.

        Raises:
            SmeltError: the model has none whose number can be changed, or they are experts'.
        """
        kind = type(model.skeleton.model).__name__
        field, width = _field(model)
        if width <= _LESS:
            raise SmeltError(f"{kind}: its feed-forward layers have {width} channels, too few to prune")
        smaller = _with_width(model, field, width - _LESS)
        try:
            skeleton = Skeleton.build(
                smaller.config(), torch.float32, trust_remote_code=smaller.trust_remote_code
            ).parameters()
        except SmeltError as error:
            raise SmeltError(f"{kind}: {field} cannot be made smaller ({error})") from None
        found: dict[str, tuple[int, int]] = {}
        for name, parameter in model.skeleton.parameters().items():
            changed = [d for d in range(parameter.dim()) if parameter.shape[d] != skeleton[name].shape[d]]
            if not changed:
                continue
            times, rest = divmod(parameter.shape[changed[0]] - skeleton[name].shape[changed[0]], _LESS)
            if len(changed) > 1 or rest or times * width != parameter.shape[changed[0]]:
                raise SmeltError(f"{kind}: {field} changes {name} in a way that Smelt does not follow")
            found[name] = changed[0], times
        return cls(field, width, found, _reader(model, found))


def narrower(
    model: OpenModel,
    layers: FeedForward,
    kept: Mapping[int, Tensor] | int,
    changed: Mapping[str, SafetensorsFile] | None = None,
) -> OpenModel:
    """The model with some channels only.

    Args:
        model: the whole model.
        layers: where the channels are.
        kept: which stay, by block, in order; or how many, where only shapes matter.
        changed: files of weights that make up for it, already narrow, by checkpoint name.
    """
    width = kept if isinstance(kept, int) else len(next(iter(kept.values())))
    weights = _FewerChannels(model, layers, kept, width, changed or {})
    return OpenModel(_with_width(model, layers.field, width), weights, is_edited=model.is_edited)


def _with_width(model: OpenModel, field: str, width: int) -> ModelDirectory:
    return replace(model.directory, changes={**model.directory.changes, field: width})


def _field(model: OpenModel) -> tuple[str, int]:
    stored = model.config.to_dict()
    for name in _NAMES:
        value = stored.get(name)
        if isinstance(value, int):
            return name, value
        if name == "n_inner" and name in stored and value is None:  # GPT-2's stands for four times the hidden size
            return name, 4 * model.skeleton.hidden_size
    raise SmeltError(
        f"{type(model.skeleton.model).__name__}: config.json names no number of feed-forward channels"
        f" ({', '.join(_NAMES)}), so they cannot be pruned"
    )


def _reader(model: OpenModel, found: Mapping[str, tuple[int, int]]) -> str:
    """The one linear of a block that reads all channels, by its name within the block."""
    kind = type(model.skeleton.model).__name__
    readers: set[str] = set()
    for anatomy in model.anatomy.blocks:
        prefix = f"{anatomy.name}."
        names: list[str] = [
            name.removeprefix(prefix).removesuffix(".weight")
            for name, (dim, times) in found.items()
            if name.startswith(prefix) and name.endswith(".weight") and _is_column(model, name, dim) and times == 1
        ]
        if len(names) != 1:
            raise SmeltError(
                f"{kind}: {len(names)} linears of {anatomy.name} read feed-forward channels; one is expected"
            )
        readers.add(names[0])
    if len(readers) != 1:
        raise SmeltError(f"{kind}: blocks read their feed-forward channels by {', '.join(sorted(readers))}")
    return readers.pop()


def _is_column(model: OpenModel, name: str, dim: int) -> bool:
    """Whether a linear's inputs lie in this dimension of its weight; GPT-2's Conv1D has them in the first."""
    label = name.removesuffix(".weight")
    return label in model.linears and dim == (0 if model.linears[label].kind == "Conv1D" else 1)


class _FewerChannels:
    """The tensors of a model, those of feed-forward layers with some channels only."""

    def __init__(
        self,
        model: OpenModel,
        layers: FeedForward,
        kept: Mapping[int, Tensor] | int,
        width: int,
        changed: Mapping[str, SafetensorsFile],
    ) -> None:
        self._source: Weights = model.weights
        self._layers, self._kept, self._width, self._changed = layers, kept, width, changed
        self._block_of: dict[str, int] = {}
        self._place: dict[str, tuple[int, int]] = {}
        blocks = {anatomy.name: index for index, anatomy in enumerate(model.anatomy.blocks)}
        for name, place in layers.parameters.items():
            key = model.names[name]
            self._place[key] = place
            self._block_of[key] = next(i for block, i in blocks.items() if name.startswith(f"{block}."))

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        if name not in self._place:
            return info
        dim, times = self._place[name]
        shape = (*info.shape[:dim], times * self._width, *info.shape[dim + 1 :])
        return TensorInfo(info.dtype, shape)

    @property
    def nbytes(self) -> int:
        return sum(self.info(name).nbytes for name in self.names())

    def load(self, name: str) -> Tensor:
        if name in self._changed:
            return self._changed[name].load(name)
        tensor = self._source.load(name)
        if name not in self._place:
            return tensor
        dim, times = self._place[name]
        stays = torch.arange(self._width) if isinstance(self._kept, int) else self._kept[self._block_of[name]]
        return tensor.index_select(dim, _places(stays, self._layers.width, times).to(tensor.device)).contiguous()


def _places(stays: Tensor, width: int, times: int) -> Tensor:
    """Where channels lie in a dimension that has all of them several times, one time after another."""
    return torch.cat([stays + part * width for part in range(times)])
