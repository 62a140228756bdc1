"""Linears whose warps go over the columns together: one step of columns after another, whose loads overlap the products before."""

# Triton takes constants where its types say that it takes what they hold.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from ..base.products import finished
from . import unpack
from .codes import across, pieces_of, scale_of, scaled, words_of
from .finish import ONE_TILE


@triton.jit
def _inputs(x_rows, k, valid, K, EVEN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """``[BM, 64]`` inputs from column ``k`` on, in the order of the pieces that they are multiplied by."""
    columns = k + tl.arange(0, 64)[None, :]
    mask = valid[:, None] if EVEN else valid[:, None] & (columns < K)
    inputs = tl.load(x_rows + columns, mask=mask, other=0.0).to(HALF)
    if FORMAT == "sparse4":
        # Of four neighbours each is in another piece.
        inputs = tl.reshape(tl.permute(tl.reshape(inputs, [BM, 16, 4]), [0, 2, 1]), [BM, 64])
    return inputs


@triton.jit
def _weights(
    pieces,
    word,
    at,
    scales,
    k,
    n,
    FILLED,
    KIND: tl.constexpr,
    SHARE: tl.constexpr,
    G: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FOLD: tl.constexpr,
    COVERS: tl.constexpr,
    WITHIN: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """``[BN, 64]`` weights of four pieces, less their zero-points, and scaled if scales are folded into them.

    Args:
        word, at: the word of the first piece's scale, and which part of it; of the others words are read where these have others.
        k: the first piece's first column.
    """
    a, b, c, d = pieces
    if FOLD or KIND == "zero":
        a = scaled(a, word, at, KIND, SCALE_TYPE, HALF, FOLD, ASM)
        if WITHIN == 16:
            word = tl.load(scales + (k // 16 + 1) * FILLED + n)
        b = scaled(b, word, at + 16 // G, KIND, SCALE_TYPE, HALF, FOLD, ASM)
        if WITHIN <= 32:
            word = tl.load(scales + ((k + 32) // COVERS) * FILLED + n)
        c = scaled(c, word, (at + 32 // G) % SHARE, KIND, SCALE_TYPE, HALF, FOLD, ASM)
        if WITHIN == 16:
            word = tl.load(scales + (k // 16 + 3) * FILLED + n)
        d = scaled(d, word, (at + 48 // G) % SHARE, KIND, SCALE_TYPE, HALF, FOLD, ASM)
    return unpack.side_by_side(a, b, c, d)


@triton.jit
def sum_steps(
    codes,
    more,
    scales,
    x_rows,
    valid,
    part,
    steps,
    split,
    n0,
    n,
    K,
    FILLED,
    EVEN: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    SHARE: tl.constexpr,
    G: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FOLD: tl.constexpr,
    COVERS: tl.constexpr,
    STAGES: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """``[BN, BM]`` sums of products over a program's steps.

    Args:
        x_rows, valid: where rows of inputs begin, and which of them are real.
        part, steps, split: which part of the steps the program has, how many there are for all of them, and how many parts.
    """
    # Of the columns whose scales share a word what a step has, and whether that is all.
    WITHIN: tl.constexpr = COVERS if COVERS < STEP else STEP
    WHOLE: tl.constexpr = STEP % COVERS == 0
    WIDE: tl.constexpr = G if G < STEP else STEP
    acc = tl.zeros([BN, BM], tl.float32)
    each = tl.cdiv(steps, split)
    for step in tl.range(part * each, tl.minimum(part * each + each, steps), num_stages=STAGES):
        k0 = step * STEP
        word = tl.zeros([BN], tl.int32)
        part_of_group = tl.zeros_like(acc)
        for b in tl.static_range(STEP // BLOCK):
            block = step * (STEP // BLOCK) + b
            words = words_of(codes, more, block, FILLED, n0, BN, FORMAT, BM <= ONE_TILE)
            pieces = pieces_of(words, FORMAT, HALF, ASM)
            for s in tl.static_range(BLOCK // 64):
                k = k0 + b * BLOCK + s * 64
                inputs = _inputs(x_rows, k, valid, K, EVEN, BM, FORMAT, HALF)
                four = pieces[4 * s], pieces[4 * s + 1], pieces[4 * s + 2], pieces[4 * s + 3]
                if KIND == "none":
                    acc = tl.dot(unpack.side_by_side(four[0], four[1], four[2], four[3]), tl.trans(inputs), acc)
                else:
                    first = b * BLOCK + s * 64
                    if first % WITHIN == 0:
                        word = tl.load(scales + (k // COVERS) * FILLED + n)
                    at = first % COVERS // G if WHOLE else k % COVERS // G
                    weights = _weights(
                        four, word, at, scales, k, n, FILLED,
                        KIND, SHARE, G, SCALE_TYPE, FOLD, COVERS, WITHIN, HALF, ASM,
                    )  # fmt: skip
                    if FOLD:
                        acc = tl.dot(weights, tl.trans(inputs), acc)
                    else:
                        # A group's weights are whole numbers; it is scaled when it is summed up.
                        if first % WIDE == 0:
                            part_of_group = tl.dot(weights, tl.trans(inputs))
                        else:
                            part_of_group = tl.dot(weights, tl.trans(inputs), part_of_group)
                        if (first + 64) % WIDE == 0:
                            acc += part_of_group * across(scale_of(word, at, KIND, SCALE_TYPE))
        if FOLD or KIND == "none":
            acc = finished(acc, ASM)
    return acc
