"""From a weight's packed words and scales to the pieces that are multiplied, inside a kernel."""

# Triton takes constants where its types say that it takes what they hold.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from . import unpack


@triton.jit
def scale_of(word, part, KIND: tl.constexpr, SCALE_TYPE: tl.constexpr):
    """The scale in one part of a word, in float32."""
    if KIND == "full":
        return word.to(tl.float32, bitcast=True)
    elif KIND == "e8m0":
        return (((word >> (part * 8)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        # Scales are not negative, and 2^120 makes up for the difference of the exponents' biases.
        return (((word >> (part * 8)) & 0xFF) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        bits = word if KIND == "zero" else word >> (part * 16)
        if SCALE_TYPE == tl.bfloat16:
            return (bits << 16).to(tl.float32, bitcast=True)
        else:
            return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def across(values):
    """Values of rows, to be spread over columns."""
    return tl.expand_dims(values, len(values.shape))


@triton.jit
def words_of(codes, more, block, rows, n0, BN: tl.constexpr, FORMAT: tl.constexpr, ONCE: tl.constexpr):
    """A block's packed words, as a tuple of ``[BN, 16]``; ``rows`` are all that the matrix is filled up to."""
    place = (block * rows + n0) * 16
    if FORMAT == "int4" or FORMAT == "float4" or FORMAT == "int2" or FORMAT == "upper4":
        return (unpack.load_words(codes, place, BN, ONCE),)
    elif FORMAT == "nested8":
        return unpack.load_words(codes, place, BN, ONCE), unpack.load_words(more, place, BN, ONCE)
    else:
        first = unpack.load_words(codes, (2 * block * rows + n0) * 16, BN, ONCE)
        second = unpack.load_words(codes, ((2 * block + 1) * rows + n0) * 16, BN, ONCE)
        if FORMAT == "int8" or FORMAT == "float8":
            return first, second
        else:
            return first, second, unpack.load_words(more, place, BN, ONCE)


@triton.jit
def pieces_of(words, FORMAT: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """A block's weights, as a tuple of ``[BN, 16]``, or of ``[SLICES, BN, 16]``."""
    if FORMAT == "int4":
        return unpack.int4(words[0], HALF, ASM)
    elif FORMAT == "float4":
        return unpack.float4(words[0], HALF, ASM)
    elif FORMAT == "int2":
        return unpack.int2(words[0], HALF, ASM)
    elif FORMAT == "upper4":
        return unpack.upper4(words[0], HALF, ASM)
    elif FORMAT == "nested8":
        return unpack.nested8(words[0], words[1], HALF, ASM)
    elif FORMAT == "int8":
        a = unpack.int8(words[0], HALF, ASM)
        b = unpack.int8(words[1], HALF, ASM)
        return a[0], a[1], b[0], b[1]
    elif FORMAT == "float8":
        c = unpack.float8(words[0], HALF, ASM)
        d = unpack.float8(words[1], HALF, ASM)
        return c[0], c[1], d[0], d[1]
    else:
        if FORMAT == "int3":
            e = unpack.int3(words[0], words[2], False, HALF, ASM)
            f = unpack.int3(words[1], words[2], True, HALF, ASM)
        else:
            e = unpack.sparse4(words[0], words[2], False, HALF, ASM)
            f = unpack.sparse4(words[1], words[2], True, HALF, ASM)
        return e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]


@triton.jit
def scaled(
    piece,
    word,
    part,
    KIND: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HALF: tl.constexpr,
    FOLD: tl.constexpr,
    ASM: tl.constexpr,
):
    """A piece less its group's zero-points, and times its scales if they are folded into the weights."""
    if KIND == "zero":
        piece = unpack.minus(piece, across((word >> 16).to(tl.float32).to(HALF)), HALF, ASM)
    if FOLD:
        piece = unpack.times(piece, across(scale_of(word, part, KIND, SCALE_TYPE).to(HALF)), HALF, ASM)
    return piece
