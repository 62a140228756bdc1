"""A model whose norms are folded and whose hidden states are rotated, without a copy on the disk.

Each tensor is edited as it is read. What is quantized comes as float32, so that rotating costs no
precision before rounding; everything else in the type that the checkpoint stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.checkpoint.weights import ChangedWeights
from ...models.structure.open_model import OpenModel
from ...models.structure.untied_head import with_untied_head
from ...system.errors import SmeltError
from .links import as_rows, links_of
from .residual import BlockResidual, OuterResidual, find_block_residual, find_outer_residual, folded_norm
from .rotation import Rotation

_SLICE = 4096


class RotationError(SmeltError):
    """A model's hidden states cannot be rotated without changing its function."""


@dataclass(frozen=True)
class ModelRotation:
    """The rotations of a model.

    Attributes:
        hidden: the hidden states'; None to fold norms only.
        heads: the value heads', one for each block; None where there are none.
    """

    hidden: Rotation | None
    heads: tuple[Rotation | None, ...]

    @classmethod
    def random(cls, residual: Residual, width: int, seed: int) -> ModelRotation:
        """Random rotations that suit the model's norms; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        hidden = Rotation.random(width, generator, keep_ones=residual.centred)
        heads = [Rotation.random(b.heads.width, generator) if b.heads else None for b in residual.blocks]
        return cls(hidden, tuple(heads))

    @classmethod
    def none(cls, residual: Residual) -> ModelRotation:
        """No rotation: norms are folded only."""
        return cls(None, (None,) * len(residual.blocks))


@dataclass(frozen=True)
class Residual:
    """What takes part in a model's residual stream."""

    outer: OuterResidual
    blocks: tuple[BlockResidual, ...]

    @property
    def centred(self) -> bool:
        """Whether a norm subtracts the mean, which commutes only with rotations that keep it."""
        return self.outer.centred or any(block.centred for block in self.blocks)

    @classmethod
    def find(cls, model: OpenModel) -> Residual:
        """Find them by experiment.

        Raises:
            RotationError: the model's hidden states cannot be rotated, and why.
        """
        outer = find_outer_residual(model.skeleton)
        if isinstance(outer, str):
            raise RotationError(f"its hidden states cannot be rotated: {outer}")
        known: dict[object, BlockResidual] = {}
        blocks = []
        for index, anatomy in enumerate(model.anatomy.blocks):
            shape = model.block_shape(index)
            if shape not in known:
                found = find_block_residual(model.skeleton, anatomy, links_of(model, index))
                if isinstance(found, str):
                    raise RotationError(f"its hidden states cannot be rotated: {found}")
                known[shape] = found
            blocks.append(known[shape])
        return cls(outer, tuple(blocks))


def rotated(model: OpenModel, residual: Residual, rotation: ModelRotation) -> OpenModel:
    """The same function with other weights. A head that shared the embedding's weight gets its own."""
    untied = with_untied_head(model)
    return OpenModel(
        model.directory, RotatedWeights(untied, residual, rotation), untied_head=model.is_tied, is_edited=True
    )


class RotatedWeights(ChangedWeights):
    """The edited weights of a model, whose head has its own, by their names in its checkpoint."""

    def __init__(self, model: OpenModel, residual: Residual, rotation: ModelRotation) -> None:
        super().__init__(model.weights)
        self._model = model
        self._residual = residual
        self._rotation = rotation
        self._name_of = {key: name for name, key in model.names.items()}
        self._embedding, self._head = model.embedding_key, model.names[f"{model.skeleton.head_name}.weight"]

    def load(self, name: str) -> Tensor:
        """A tensor, edited."""
        if name == self._head:
            return self._head_weight()
        label = self._name_of.get(name)
        if label is None:  # nothing that the model knows, such as an old buffer
            return self._source.load(name)
        stored = self.info(name).dtype
        outer, hidden = self._residual.outer, self._rotation.hidden
        inside = self._model.skeleton.blocks_name + "."
        if label.startswith(inside):
            return self._block_tensor(label.removeprefix(inside))
        tensor = self._source.load(name)
        if outer.norm is not None and label.rpartition(".")[0] == outer.norm:
            gain = self._source.load(self._model.names[f"{outer.norm}.weight"])
            return folded_norm(tensor, label.rpartition(".")[2], gain, outer.offset, hidden).to(stored)
        if name == self._embedding or label in outer.tables:
            return self._rotated_rows(tensor, None)
        return tensor

    def _block_tensor(self, path: str) -> Tensor:
        index, _, name = path.partition(".")
        i = int(index)
        prefix = f"{self._model.skeleton.blocks_name}.{index}."
        block = self._model.skeleton.blocks[i]

        def load(local: str) -> Tensor:
            tensor = self._source.load(self._model.names[prefix + local])
            return as_rows(block.get_submodule(local.rpartition(".")[0]), tensor)

        module = block.get_submodule(name.rpartition(".")[0])
        edited = self._residual.blocks[i].edited(name, load, self._rotation.hidden, self._rotation.heads[i])
        edited = as_rows(module, edited)
        if edited.is_floating_point() and edited.dim() > 1:
            return edited.to(
                torch.promote_types(self.info(self._model.names[prefix + name]).dtype, torch.float32)
            ).contiguous()
        return edited.to(self.info(self._model.names[prefix + name]).dtype)

    def _head_weight(self) -> Tensor:
        outer = self._residual.outer
        weight = self._source.load(self._head)
        if outer.norm is None:
            return self._rotated_rows(weight, None)
        gain = self._source.load(self._model.names[f"{outer.norm}.weight"]).double() + outer.offset
        return self._rotated_rows(weight, gain)

    def _rotated_rows(self, table: Tensor, gain: Tensor | None) -> Tensor:
        """In slices: a wide copy of an embedding would be the largest thing in memory."""
        out = torch.empty_like(table)
        for start in range(0, len(table), _SLICE):
            part = table[start : start + _SLICE].double()
            part = part if gain is None else part * gain
            out[start : start + _SLICE] = part if self._rotation.hidden is None else self._rotation.hidden.apply(part)
        return out
