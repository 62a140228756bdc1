"""Attention over a paged cache, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .batch import Batch, Singles
from .kv_cache import KeysValues


def attend(
    queries: Tensor,
    store: KeysValues,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None,
    batch: Batch,
) -> Tensor:
    """Attention of a step's tokens to their sequences' cached positions, including their own.

    Args:
        queries: ``[tokens, heads, size]``; their keys and values are in ``store`` already.
        store: the cache.
        layer: which layer's.
        scale: the factor of scores.
        window: how many positions back a token sees, itself included; None for all.
        cap: soft cap on scores.
        batch: whose tokens these are.

    Returns:
        ``[tokens, heads, size]``.
    """
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if batch.singles is not None:
        for group in batch.singles.groups(store.block_size):
            out[group.rows] = _singles(queries[group.rows], store, layer, scale, window, cap, group)
    for i in batch.longer:
        rows = slice(batch.starts[i], batch.starts[i + 1])
        run = batch.runs[i]
        keys, values = store.read(layer, batch.tables[i], queries.dtype)
        keys, values = keys[:, : run.stop], values[:, : run.stop]
        whole = run.start == 0 and (window is None or run.stop <= window)
        mask = None if whole and cap is None else _mask(run.start, run.stop, window)
        found = _scaled(queries[rows].transpose(0, 1)[None], keys[None], values[None], mask, scale, cap)
        out[rows] = found[0].transpose(0, 1)
    return out


def _mask(start: int, stop: int, window: int | None) -> Tensor:
    """The positions that each token from ``start`` on attends to."""
    positions = torch.arange(start, stop).unsqueeze(1)
    seen = torch.arange(stop)
    mask = seen <= positions
    if window is not None:
        mask &= seen > positions - window
    return mask


def _singles(
    queries: Tensor,
    store: KeysValues,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None,
    group: Singles,
) -> Tensor:
    keys, values = store.read(layer, group.tables, queries.dtype)
    seen = torch.arange(keys.shape[-2])
    stops = group.stops.unsqueeze(1)
    mask = seen < stops
    # Memory of other sequences may hold anything, and a mask does not hide NaN.
    foreign = ~mask[:, None, :, None]
    keys, values = keys.masked_fill(foreign, 0), values.masked_fill(foreign, 0)
    if window is not None:
        mask &= seen >= stops - window
    return _scaled(queries.unsqueeze(2), keys, values, mask[:, None, None], scale, cap).squeeze(2)


def _scaled(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    """Attention of ``[batch, heads, tokens, size]``; a group of query heads shares each key-value head.

    Without a mask, attention is causal.
    """
    if cap is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    assert mask is not None
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.tanh(queries @ keys.transpose(2, 3) * scale / cap) * cap
    shares = scores.float().masked_fill(~mask, float("-inf")).softmax(-1)
    return shares.to(queries.dtype) @ values
