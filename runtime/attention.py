"""Attention over a paged cache, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .architectures import LayerSpec
from .batch import Batch, Singles


class PagedKeysValues:
    """Keys and values of all layers, in blocks of ``block_size`` positions.

    Args:
        layers, heads, size: the model's layers, key-value heads and head size.
        blocks: how many blocks.
        block_size: positions in a block.
        dtype: of what is stored.
    """

    def __init__(self, layers: int, heads: int, size: int, blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self._keys = torch.zeros(layers, blocks * block_size, heads, size, dtype=dtype)
        self._values = torch.zeros_like(self._keys)

    @staticmethod
    def block_bytes(layers: int, heads: int, size: int, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block, over all layers."""
        return 2 * layers * block_size * heads * size * dtype.itemsize

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[tokens, heads, size]`` at ``slots``."""
        self._keys[layer].index_copy_(0, slots, keys.to(self._keys.dtype))
        self._values[layer].index_copy_(0, slots, values.to(self._values.dtype))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored at ``slots``, whatever their shape."""
        flat = slots.flatten()
        shape = (*slots.shape, *self._keys.shape[2:])
        return self._keys[layer].index_select(0, flat).view(shape), self._values[layer].index_select(0, flat).view(
            shape
        )

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(from, to)``."""
        for source, target in pairs:
            a, b = source * self.block_size, target * self.block_size
            for store in (self._keys, self._values):
                store[:, b : b + self.block_size] = store[:, a : a + self.block_size]


def attend(
    queries: Tensor, store: PagedKeysValues, layer: int, spec: LayerSpec, cap: float | None, batch: Batch
) -> Tensor:
    """Attention of a step's tokens to what their sequences hold, themselves included.

    Args:
        queries: ``[tokens, heads, size]``; their keys and values are in ``store`` already.
        store: the cache.
        layer: which layer's.
        spec: that layer's scale and window.
        cap: soft cap on scores.
        batch: whose tokens these are.

    Returns:
        ``[tokens, heads, size]``.
    """
    out = torch.empty_like(queries)
    for group in batch.singles:
        out[group.rows] = _singles(queries[group.rows], store, layer, spec, cap, group)
    for i in batch.longer:
        rows = slice(batch.starts[i], batch.starts[i + 1])
        run = batch.runs[i]
        keys, values = store.read(layer, batch.run_slots(i))
        positions = torch.arange(run.start, run.stop).unsqueeze(1)
        seen = torch.arange(run.stop)
        mask = seen <= positions
        if spec.window is not None:
            mask &= seen > positions - spec.window
        found = _scaled(
            queries[None, rows].transpose(1, 2),
            keys[None].transpose(1, 2),
            values[None].transpose(1, 2),
            mask,
            spec.scale,
            cap,
        )
        out[rows] = found[0].transpose(0, 1)
    return out


def _singles(
    queries: Tensor, store: PagedKeysValues, layer: int, spec: LayerSpec, cap: float | None, group: Singles
) -> Tensor:
    keys, values = store.read(layer, group.slots)
    seen = torch.arange(keys.shape[1])
    stops = group.stops.unsqueeze(1)
    mask = seen < stops
    if spec.window is not None:
        mask &= seen >= stops - spec.window
    found = _scaled(
        queries.unsqueeze(2), keys.transpose(1, 2), values.transpose(1, 2), mask[:, None, None], spec.scale, cap
    )
    return found.squeeze(2)


def _scaled(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float | None) -> Tensor:
    """Attention of ``[batch, heads, tokens, size]``; a group of query heads shares each key-value head."""
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    if cap is None:
        return functional.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.tanh(queries @ keys.transpose(2, 3) * scale / cap) * cap
    shares = scores.float().masked_fill(~mask, float("-inf")).softmax(-1)
    return shares.to(queries.dtype) @ values
