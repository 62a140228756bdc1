"""The epilogue of every linear: sum the parts, then apply bias, gate or activation, routing weight and residual."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

_ACTIVATIONS = {
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
_GATED = ("silu", "gelu_tanh")
# A tile of so few rows is likely the only one, so its weights are read once and need not evict other data from the cache.
# Triton's copies to shared memory (two stages and more) bypass the L1 cache and drop this hint.
ONE_TILE = tl.constexpr(16)
GATES = ("none", *_GATED, *(f"alone_{name}" for name in _ACTIVATIONS))


def is_gated(gate: str) -> bool:
    """Whether outputs are products of an activated gate and its up projection: half as many as the weight's rows.

    Raises:
        ValueError: it is not one of :data:`GATES`.
    """
    if gate not in GATES:
        raise ValueError(f"unknown gate {gate!r}; known: {', '.join(GATES)}")
    return gate in _GATED


def activated(sums: Tensor, gate: str) -> Tensor:
    """:func:`store_outputs` on ``[rows, sums]`` in plain torch; all rows of a gate come before those of its up projection."""
    if gate == "none":
        return sums
    activate = _ACTIVATIONS[gate.removeprefix("alone_")]
    if not is_gated(gate):
        return activate(sums)
    left, right = sums.chunk(2, dim=1)
    return activate(left) * right


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
def activation(values, GATE: tl.constexpr):
    """float32 values of a gate, or of a plain feed-forward part, activated."""
    if GATE == "silu" or GATE == "alone_silu":
        return values * tl.sigmoid(values)
    elif GATE == "gelu_tanh" or GATE == "alone_gelu_tanh":
        # tanh(z) is 2 sigmoid(2z) - 1.
        return values * tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
    elif GATE == "alone_gelu":
        return 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    else:
        tl.static_assert(GATE == "alone_relu", "an activation is not known")
        return tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gated(both, GATE: tl.constexpr):
    """From rows of a gate and of its inputs, 8 by 8, to their product."""
    BN: tl.constexpr = both.shape[0]
    BM: tl.constexpr = both.shape[1]
    # The two of a pair are in the same thread.
    gate, up = tl.split(tl.permute(tl.reshape(both, [BN // 16, 2, 8, BM]), [0, 2, 3, 1]))
    return tl.reshape(activation(gate, GATE) * up, [BN // 2, BM])


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
    if GATE == "silu" or GATE == "gelu_tanh":
        acc = _gated(acc, GATE)
        n = tile_n * (BN // 2) + tl.arange(0, BN // 2)
        outputs = N // 2
    elif GATE != "none":
        acc = activation(acc, GATE)
    to = slot.to(tl.int64)[None, :] * outputs + n[:, None]
    inside = valid[None, :] & (n < outputs)[:, None]
    if shares is not None:
        acc *= tl.load(shares + slot, mask=valid, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        # It may be what is written to: no other program reads or writes this one's outputs.
        acc += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)
