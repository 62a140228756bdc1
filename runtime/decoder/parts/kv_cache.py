"""The paged KV cache and its dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ....system.errors import RuntimeProblem
from ....system.hardware.pages import zeros_in_large_pages
from ...cache_types import cache_type_of

if TYPE_CHECKING:
    from ...weights.cache_scheme import CacheRule

Rules = Sequence[tuple["CacheRule", "CacheRule"]]


class KeysValues(Protocol):
    """A paged KV cache, in any memory layout.

    Attributes:
        block_size: positions in a block.
        dtype: of what is stored.
        handles: the kernels' handles of its layers, filled by them.
        rules: how each layer's keys and values are rounded, if the checkpoint sets it; None otherwise.
    """

    block_size: int
    dtype: torch.dtype
    handles: dict[Any, Any]
    rules: Rules | None

    def layer(self, index: int) -> Any:
        """One layer's part, in the kernels' layout."""
        ...

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, heads, size]`` at ``slots``: block index times block size plus the offset in the block."""
        ...

    def read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., heads, positions, size]`` of blocks ``[..., count]``, in ``dtype``."""
        ...

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(from, to)``."""
        ...

    def by_block(self) -> list[Tensor]:
        """All of its memory, each tensor as ``[layers, blocks, ...]``."""
        ...


@dataclass(frozen=True)
class LayerStore:
    """One layer's part of the cache.

    Attributes:
        keys: ``[blocks, heads, pairs of elements, positions of a block, 2]``: a kernel reads a pair of many positions at once.
        values: ``[blocks, heads, pairs of positions, size, 2]``; the last pair of an odd block is half empty.
        key_scales, value_scales: ``[blocks, heads, positions of a block]``, in int8 and float8 only.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    def tensors(self) -> list[Tensor]:
        """All of its memory."""
        return [each for each in (self.keys, self.values, self.key_scales, self.value_scales) if each is not None]

    def part(self, index: int) -> LayerStore:
        """One layer of several layers' parts with a leading dimension."""
        scales = (None if each is None else each[index] for each in (self.key_scales, self.value_scales))
        return LayerStore(self.keys[index], self.values[index], *scales)


class PagedKeysValues:
    """Keys and values of all layers, in blocks of ``block_size`` positions.

    Args:
        heads: of each layer's keys and values.
        size: of a head.
        blocks: how many blocks.
        block_size: positions in a block.
        dtype: of what is stored; int8 and float8_e4m3fn have a scale for each head and position.
        device: where.
        rules: how each layer's keys and values become codes and scales, if the checkpoint sets it.

    Attributes:
        handles: the kernels' handles of its layers, filled by them.
    """

    def __init__(
        self,
        heads: Sequence[int],
        size: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        rules: Rules | None = None,
    ) -> None:
        if size % 2:
            raise RuntimeProblem(f"the model's head size is {size}; the cache stores pairs, so it must be even")
        self.block_size = block_size
        self.dtype = dtype
        self.handles: dict[Any, Any] = {}
        self.rules = rules
        self._layers: dict[int, LayerStore] = {}
        # Layers with the same number of heads are contiguous, so that a block of all of them is copied at once.
        self._alike: list[LayerStore] = []
        for count in dict.fromkeys(heads):
            layers = [layer for layer, own in enumerate(heads) if own == count]
            shape, scaled = (len(layers), blocks, count), cache_type_of(dtype).limit is not None
            together = LayerStore(
                zeros_in_large_pages((*shape, size // 2, block_size, 2), dtype, device),
                zeros_in_large_pages((*shape, -(-block_size // 2), size, 2), dtype, device),
                torch.zeros(*shape, block_size, device=device) if scaled else None,
                torch.zeros(*shape, block_size, device=device) if scaled else None,
            )
            self._alike.append(together)
            for place, layer in enumerate(layers):
                self._layers[layer] = together.part(place)

    @staticmethod
    def block_bytes(heads: Sequence[int], size: int, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block, over all layers."""
        scale = torch.float32.itemsize if cache_type_of(dtype).limit is not None else 0
        positions = block_size + 2 * -(-block_size // 2)  # of keys, and of values
        return sum(heads) * (positions * size * dtype.itemsize + 2 * block_size * scale)

    def layer(self, index: int) -> LayerStore:
        """One layer's part."""
        return self._layers[index]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, heads, size]`` at ``slots``: block index times block size plus the offset in the block."""
        part = self.layer(layer)
        blocks, inside = slots // self.block_size, slots % self.block_size
        if self.rules is None:
            (key_codes, key_scales), (value_codes, value_scales) = (_rounded(x, self.dtype) for x in (keys, values))
        else:
            of_keys, of_values = self.rules[layer]
            (key_codes, key_scales), (value_codes, value_scales) = of_keys(keys), of_values(values)
        _bits(part.keys)[blocks, :, :, inside] = _bits(key_codes).unflatten(-1, (-1, 2))
        _bits(part.values)[blocks, :, inside // 2, :, inside % 2] = _bits(value_codes)
        if part.key_scales is not None and part.value_scales is not None:
            part.key_scales[blocks, :, inside] = key_scales
            part.value_scales[blocks, :, inside] = value_scales

    def read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., heads, positions, size]`` of blocks ``[..., count]``, in ``dtype``."""
        part = self.layer(layer)
        keys = _taken(part.keys, blocks).movedim(-2, -3).flatten(-2)
        values = _taken(part.values, blocks).movedim(-1, -2).flatten(-3, -2)[..., : self.block_size, :]
        return _joined(keys, part.key_scales, blocks, dtype), _joined(values, part.value_scales, blocks, dtype)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(from, to)``."""
        for stored in (tensor for alike in self._alike for tensor in alike.tensors()):
            for source, target in pairs:
                stored[:, target] = stored[:, source]

    def by_block(self) -> list[Tensor]:
        """All of its memory, each tensor as ``[layers, blocks, ...]``."""
        return [tensor for alike in self._alike for tensor in alike.tensors()]


def _rounded(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values ``[..., size]`` in the cache's dtype, and their scales ``[...]`` if it has any."""
    largest = cache_type_of(dtype).limit
    if largest is None:
        return values.to(dtype), values
    wide = values.float()
    scales = wide.abs().amax(-1) / largest
    scaled = wide / torch.where(scales > 0, scales, 1).unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled.clamp(-largest, largest)).to(dtype), scales


def _taken(stored: Tensor, blocks: Tensor) -> Tensor:
    return _bits(stored).index_select(0, blocks.flatten()).view(stored.dtype).unflatten(0, blocks.shape)


def _joined(found: Tensor, scales: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., count, heads, positions, size]`` in ``dtype``, with the blocks' positions one after another."""
    if scales is not None:
        found = found.float() * _taken(scales, blocks).unsqueeze(-1)
    return found.to(dtype).movedim(-3, -4).flatten(-3, -2)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as bytes where torch cannot index the dtype."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
