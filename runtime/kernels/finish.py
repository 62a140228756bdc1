"""What every linear does once its sums are there: add the parts, then bias, gate, share and residual."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_parts(acc, parts, arrived, tile, part, slot, valid, n, M, FILLED, split):
    """Leave this program's part; whoever comes last has the sum of all, added in one order, so that bits repeat.

    Returns:
        The sum, and whether this program has it.
    """
    tl.store(parts + (part * M + slot).to(tl.int64)[None, :] * FILLED + n[:, None], acc, mask=valid[None, :])
    # On NVIDIA's GPUs all threads' stores come before the one that counts; on AMD's tiles are not shared.
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1
    if last:
        acc = tl.zeros_like(acc)
        for i in range(split):
            theirs = parts + (i * M + slot).to(tl.int64)[None, :] * FILLED + n[:, None]
            acc += tl.load(theirs, mask=valid[None, :], other=0.0, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return acc, last


@triton.jit
def _gated(both, GATE: tl.constexpr):
    """From rows of a gate and of its inputs, 8 by 8, to their product."""
    BN: tl.constexpr = both.shape[0]
    BM: tl.constexpr = both.shape[1]
    # The two of a pair are in the same thread.
    gate, up = tl.split(tl.permute(tl.reshape(both, [BN // 16, 2, 8, BM]), [0, 2, 3, 1]))
    if GATE == "silu":
        gate = gate * tl.sigmoid(gate)
    else:
        # The tanh form of gelu: tanh(z) is 2 sigmoid(2z) - 1.
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return tl.reshape(gate * up, [BN // 2, BM])


@triton.jit
def store_outputs(
    acc, out, row_scales, bias, residual, shares, tile_n, slot, valid, N, BN: tl.constexpr, GATE: tl.constexpr
):
    """``[BN, BM]`` sums to rows of outputs."""
    n = tile_n * BN + tl.arange(0, BN)
    if row_scales is not None:
        acc *= tl.load(row_scales + n)[:, None]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    outputs = N
    if GATE != "none":
        acc = _gated(acc, GATE)
        n = tile_n * (BN // 2) + tl.arange(0, BN // 2)
        outputs = N // 2
    to = slot.to(tl.int64)[None, :] * outputs + n[:, None]
    inside = valid[None, :] & (n < outputs)[:, None]
    if shares is not None:
        acc *= tl.load(shares + slot, mask=valid, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        acc += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)
