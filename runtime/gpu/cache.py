"""The paged KV cache on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache_types import BY_KIND, cache_type_of
from ..decoder.parts.kv_cache import Rules
from ..kernels.rows.cached import LayerCache, layer_cache, restored, rotation
from ..weights.matrix import bits


class GpuKeysValues:
    """Keys and values of all layers in blocks, in the kernels' layout.

    Args:
        heads: of each layer's keys and values.
        size: of a head.
        blocks: how many blocks.
        block_size: positions in a block.
        kept: the cache dtype; int4, int8 and 8-bit floats have a scale for each head and position.
        device: where.
        rules: how each layer's keys and values become codes and scales, if the checkpoint sets it.

    Attributes:
        block_size, dtype, handles, rules: see :class:`KeysValues`.
    """

    def __init__(
        self,
        heads: Sequence[int],
        size: int,
        blocks: int,
        block_size: int,
        kept: torch.dtype,
        device: torch.device,
        rules: Rules | None = None,
    ) -> None:
        self.block_size = block_size
        self.dtype = kept
        self.rules = rules
        self.handles: dict[Any, Any] = {}
        # Layers with the same number of heads are contiguous, so that a block of all of them is copied at once. Each has one
        # extra block, to which plain torch writes tokens without a slot.
        each = self._each = blocks + 1
        self._layers: dict[int, LayerCache] = {}
        self._alike: list[tuple[LayerCache, int]] = []
        for count in dict.fromkeys(heads):
            layers = [layer for layer, own in enumerate(heads) if own == count]
            together = layer_cache(len(layers) * each, count, block_size, size, cache_type_of(kept).kind, kept, device)
            self._alike.append((together, len(layers)))
            for place, layer in enumerate(layers):
                self._layers[layer] = together.blocks(place * each, (place + 1) * each)

    @staticmethod
    def block_bytes(heads: Sequence[int], size: int, block_size: int, kept: torch.dtype) -> int:
        """Memory of one block, over all layers."""
        one = layer_cache(1, 1, block_size, size, cache_type_of(kept).kind, kept, "meta")
        return sum(heads) * sum(part.nbytes for part in one.parts())

    def layer(self, index: int) -> LayerCache:
        """One layer's part."""
        return self._layers[index]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, heads, size]`` at ``slots``, in plain torch; slots below 0 are none."""
        part = self._layers[layer]
        slots = torch.where(slots < 0, (self._each - 1) * self.block_size, slots).long()
        if part.rotated():
            keys = (keys.double() @ rotation(part.size, part.rotated(), keys.device)).to(keys.dtype)
        blocks, inside = slots // self.block_size, slots % self.block_size
        for i, (codes, scales, found) in enumerate(
            ((part.keys, part.key_scales, keys), (part.values, part.value_scales, values))
        ):
            rounded, scale = _rounded(found, part.kind) if self.rules is None else self.rules[layer][i](found)
            bits(codes)[blocks, :, inside] = bits(rounded if scales is not None else rounded.to(codes.dtype))
            if scales is not None:
                scales[blocks, :, inside] = scale

    def read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., heads, positions, size]`` of blocks ``[..., count]``, in ``dtype``, in plain torch."""
        part = self._layers[layer]
        found = []
        for codes, scales in ((part.keys, part.key_scales), (part.values, part.value_scales)):
            taken = bits(codes)[blocks.long()].view(codes.dtype)
            wide = restored(taken, None if scales is None else scales[blocks.long()], part.kind)
            found.append(wide.movedim(-3, -4).flatten(-3, -2))
        if part.rotated():
            found[0] = found[0] @ rotation(part.size, part.rotated(), blocks.device).T
        return found[0].to(dtype), found[1].to(dtype)

    def rotated(self, layer: int, queries: Tensor) -> Tensor:
        """Queries ``[..., size]``, rotated like the layer's keys in the kernels."""
        part = self._layers[layer]
        if not part.rotated():
            return queries
        return (queries.double() @ rotation(part.size, part.rotated(), queries.device)).to(queries.dtype)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(from, to)``."""
        if not pairs:
            return
        each = torch.tensor(pairs, device=self._layers[0].keys.device).T
        for together, layers in self._alike:
            first = torch.arange(layers, device=each.device).unsqueeze(1) * self._each
            source, target = ((first + part).flatten() for part in each)
            for part in together.parts():
                bits(part)[target] = bits(part)[source]

    def by_block(self) -> list[Tensor]:
        """All of its memory, each tensor as ``[layers, blocks, ...]``."""
        return [part.unflatten(0, (layers, self._each)) for alike, layers in self._alike for part in alike.parts()]


def _rounded(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes of ``[..., size]`` and their scales ``[...]``."""
    kept = BY_KIND[kind]
    if kept.limit is None:
        return values, values
    wide = values.float()
    largest = wide.abs().amax(-1)
    scales = largest / kept.limit
    scales = torch.where(scales > 0, scales, 1)
    found = wide / scales.unsqueeze(-1)
    if kept.type == "float":
        return found.clamp(-kept.limit, kept.limit).to(kept.stored_dtype(values.dtype)), scales
    least, most = kept.code_range
    largest = largest.unsqueeze(-1)
    whole = found.round().clamp(least, most).masked_fill((wide == -largest) & (largest > 0), least)
    if not kept.packed:
        return whole.to(kept.stored_dtype(values.dtype)), scales
    whole = (whole - least).to(torch.uint8).unflatten(-1, (-1, 2))
    return whole[..., 0] | (whole[..., 1] << 4), scales
