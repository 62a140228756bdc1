"""Online softmax over cached keys and values, tile by tile: what all attention kernels share."""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cached import numbers_of, rows_of
from .launch import interpreted

# Where a step's lengths change from launch to launch, no variants may be made of their values.
CHANGING = ("M", "sequences", "programs", "tables_stride", "scratch_stride", "items")


@dataclass(frozen=True)
class Runs:
    """Consecutive tokens of sequences, on the device; what is not there has a count of 0.

    Attributes:
        rows: int32 ``[sequences]``, where each run's first token stands in the step.
        counts: int32, how many tokens.
        stops: int32, how many positions the sequence has with them.
        tables: int32 ``[sequences, blocks]`` of the cache.
    """

    rows: Tensor
    counts: Tensor
    stops: Tensor
    tables: Tensor

    def arguments(self) -> dict[str, Tensor | int | None]:
        """As kernels take them."""
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
def log2_factor(scale: float, cap: float) -> float:
    """What scores are multiplied by to be exponents of two: in the multiply-add that subtracts the highest one."""
    return (2.0 * cap if cap > 0 else scale) * 1.4426950408889634


@triton.jit
def scores_of(
    query,
    position,
    start,
    stop,
    rows,
    head_keys,
    key_scales,
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
    """Scores ``[queries, BN]``, not yet times :func:`log2_factor`; minus infinity for what a query does not see."""
    seen = start + tl.arange(0, BN)
    valid = seen < stop
    keys = numbers_of(head_keys, rows, valid, MASKED, KIND, D, DP, DOT, ASM)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if KIND != "plain":
        # A key's scale multiplies its scores instead of all its numbers.
        if MASKED:
            scale = tl.load(key_scales + rows, mask=valid, other=0.0)
        else:
            scale = tl.load(key_scales + rows)
        scores *= scale[None, :]
    if CAP > 0:
        # tanh(z) is 2 sigmoid(2z) - 1; softmax does not see the 1.
        scores = tl.sigmoid(scores * (2.0 * SCALE / CAP))
    if MASKED:
        mask = (seen[None, :] <= position[:, None]) & valid[None, :]
        if WINDOW > 0:
            mask &= seen[None, :] > position[:, None] - WINDOW
        scores = tl.where(mask, scores, float("-inf"))
    return scores


@triton.jit
def attended(
    shares,
    start,
    stop,
    rows,
    head_values,
    value_scales,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    BN: tl.constexpr,
):
    """``shares [queries, BN]`` of values."""
    valid = start + tl.arange(0, BN) < stop
    values = numbers_of(head_values, rows, valid, MASKED, KIND, D, DP, DOT, ASM)
    if KIND != "plain":
        if MASKED:
            scale = tl.load(value_scales + rows, mask=valid, other=0.0)
        else:
            scale = tl.load(value_scales + rows)
        # Shares over the tile's largest scale, so that small scales do not leave float16's range.
        largest = tl.maximum(tl.max(scale, 0), 1e-30)
        shares = shares * (scale / largest)[None, :]
        return tl.dot(shares.to(DOT), values, input_precision="ieee") * largest
    else:
        return tl.dot(shares.to(DOT), values, input_precision="ieee")


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
        Sums of values by shares, the highest score as an exponent of two, and the sum of shares, relative to it.
    """
    FACTOR: tl.constexpr = log2_factor(SCALE, CAP)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        rows = rows_of(table, start, stop, head, SHARED, BLOCK, BN)
        scores = scores_of(
            query, position, start, stop, rows, keys, key_scales, MASKED, KIND, D, DP, DOT, ASM, BN, SCALE, CAP, WINDOW
        )
        higher = tl.maximum(highest, tl.max(scores, 1) * FACTOR)
        if MASKED:
            # A query that has seen nothing yet keeps zeros instead of what infinities make.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        shares = tl.exp2(scores * FACTOR - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(shares, 1)
        acc = acc * shrink[:, None]
        acc += attended(shares, start, stop, rows, values, value_scales, MASKED, KIND, D, DP, DOT, ASM, BN)
        highest = higher
    return acc, highest, total
