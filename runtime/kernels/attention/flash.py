"""Online softmax over cached keys and values, tile by tile, shared by all attention kernels."""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import interpreted
from ..rows.cached import cached_rows, numbers_of

# A step's lengths change from launch to launch, so kernels must not be specialized on their values.
CHANGING = ("M", "sequences", "programs", "tables_stride", "scratch_stride", "items")


@dataclass(frozen=True)
class Runs:
    """Consecutive tokens of sequences, on the device; unused entries have a count of 0.

    Attributes:
        rows: int32 ``[sequences]``, the row of each run's first token in the step.
        counts: int32, how many tokens.
        stops: int32, how many positions the sequence has with them.
        tables: int32 ``[sequences, blocks]`` of the cache.
    """

    rows: Tensor
    counts: Tensor
    stops: Tensor
    tables: Tensor

    def arguments(self) -> dict[str, Tensor | int | None]:
        """Kernel arguments."""
        return {
            "rows": self.rows,
            "counts": self.counts,
            "stops": self.stops,
            "tables": self.tables,
            "tables_stride": self.tables.stride(0),
        }


def dot_types(dtype: torch.dtype, kind: str) -> dict[str, tl.dtype]:
    """What products are made of. Codes are float16 exactly, with scales that keep what they meet in its range."""
    if kind != "plain":
        return {"DOT": tl.float16}
    if dtype == torch.float32 or (dtype == torch.bfloat16 and interpreted()):
        return {"DOT": tl.float32}
    return {"DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float16}


@triton.constexpr_function
def factor_of(kind: str, scale: float, cap: float) -> float:
    """What makes scores exponents of two, in the multiply-add that subtracts the highest; those of codes are that already."""
    return 1.0 if kind != "plain" else (2.0 * cap if cap > 0 else scale) * 1.4426950408889634


@triton.jit
def _scales(scales, rows, valid, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """A tile's scales, along all but an axis of its scores."""
    if MASKED:
        found = tl.load(scales + rows, mask=valid, other=0.0)
    else:
        found = tl.load(scales + rows)
    return tl.expand_dims(found, AXIS)


@triton.jit
def _log2_scales(scales, rows, valid, AXIS: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr):
    """Logarithms of scales; that of a row of zeros has one, too."""
    found = tl.maximum(_scales(scales, rows, valid, AXIS, MASKED), 1e-30)
    if ASM:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [found], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(found)


@triton.jit
def exponents(
    scores,
    rows,
    valid,
    key_scales,
    value_scales,
    AXIS: tl.constexpr,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Exponents of two of scores whose ``AXIS`` is the queries', but for :func:`factor_of`.

    Of codes a key's scale multiplies its scores instead of all its numbers, and a value's scale is a part of its share's
    exponent: then shares stay in float16's range whatever scales are. :func:`unscaled` takes them out again.
    """
    FACTOR: tl.constexpr = factor_of("plain", SCALE, CAP)
    if KIND == "plain":
        if CAP > 0:
            # tanh(z) is 2 sigmoid(2z) - 1; softmax does not see the 1.
            scores = tl.sigmoid(scores * (2.0 * SCALE / CAP))
    else:
        scale = _scales(key_scales, rows, valid, AXIS, MASKED)
        more = _log2_scales(value_scales, rows, valid, AXIS, MASKED, ASM)
        if CAP > 0:
            scores = tl.sigmoid(scores * (scale * (2.0 * SCALE / CAP))) * FACTOR + more
        else:
            scores = scores * (scale * FACTOR) + more
    return scores


@triton.jit
def unscaled(
    shares,
    rows,
    valid,
    value_scales,
    AXIS: tl.constexpr,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
):
    """Shares without values' scales, for their sum."""
    if KIND != "plain":
        shares = shares * tl.exp2(-_log2_scales(value_scales, rows, valid, AXIS, MASKED, ASM))
    return shares


@triton.jit
def scores_of(
    query,
    position,
    start,
    stop,
    rows,
    head_keys,
    key_scales,
    value_scales,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """:func:`exponents` ``[queries, BN]``; minus infinity for what a query does not see."""
    seen = start + tl.arange(0, BN)
    valid = seen < stop
    keys = numbers_of(head_keys, rows, valid, MASKED, KIND, D, DP, DOT, ASM)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    scores = exponents(scores, rows, valid, key_scales, value_scales, 0, MASKED, KIND, ASM, SCALE, CAP)
    if MASKED:
        mask = (seen[None, :] <= position[:, None]) & valid[None, :]
        if WINDOW > 0:
            mask &= seen[None, :] > position[:, None] - WINDOW
        scores = tl.where(mask, scores, float("-inf"))
    return scores


@triton.jit
def over_positions(
    query,
    position,
    acc,
    highest,
    total,
    first,
    last,
    stop,
    table,
    head,
    keys,
    values,
    key_scales,
    value_scales,
    MASKED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Go on with softmax over positions from ``first``, a multiple of ``BN``, to ``last``.

    Returns:
        Sums of values by shares, the highest exponent, and the sum of shares, relative to it.
    """
    FACTOR: tl.constexpr = factor_of(KIND, SCALE, CAP)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        rows = cached_rows(table, start, stop, head, SHARED, BLOCK, BN)
        valid = start + tl.arange(0, BN) < stop
        scores = scores_of(
            query, position, start, stop, rows, keys, key_scales, value_scales, MASKED, KIND, D, DP, DOT, ASM, BN, SCALE,
            CAP, WINDOW,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(scores, 1) * FACTOR)
        if MASKED:
            # A query that has seen nothing yet keeps zeros instead of what infinities make.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        shares = tl.exp2(scores * FACTOR - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(unscaled(shares, rows, valid, value_scales, 0, MASKED, KIND, ASM), 1)
        found = numbers_of(values, rows, valid, MASKED, KIND, D, DP, DOT, ASM)
        acc = tl.dot(shares.to(DOT), found, acc * shrink[:, None], input_precision="ieee")
        highest = higher
    return acc, highest, total
