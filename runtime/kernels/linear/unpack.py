"""From packed 16-bit words to half-precision weights, inside a kernel: by bit tricks in PTX, or portably.

Words arrive as the threads of a tensor core's left operand hold them (``fragment``): each thread reads
16 bytes, and what it unpacks is what it multiplies, so no weight moves between threads.
"""

# Triton takes constants where its types say that it takes what they hold.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from . import ptx

_F, _B = ptx.FLOAT16, ptx.BFLOAT16
_INT2_F, _INT2_B = tl.constexpr(ptx.integers(2, _F)), tl.constexpr(ptx.integers(2, _B))
_INT4_F, _INT4_B = tl.constexpr(ptx.integers(4, _F)), tl.constexpr(ptx.integers(4, _B))
_INT8_F, _INT8_B = tl.constexpr(ptx.integers(8, _F)), tl.constexpr(ptx.integers(8, _B))
_NESTED_F, _NESTED_B = tl.constexpr(ptx.nested(_F)), tl.constexpr(ptx.nested(_B))
_UPPER_F, _UPPER_B = tl.constexpr(ptx.upper(_F)), tl.constexpr(ptx.upper(_B))
_INT3_F, _INT3_B = tl.constexpr(ptx.three_bits(_F, False)), tl.constexpr(ptx.three_bits(_B, False))
_INT3_F2, _INT3_B2 = tl.constexpr(ptx.three_bits(_F, True)), tl.constexpr(ptx.three_bits(_B, True))
_FLOAT4_F, _FLOAT4_B = tl.constexpr(ptx.floats4(_F)), tl.constexpr(ptx.floats4(_B))
_FLOAT8_F, _FLOAT8_B = tl.constexpr(ptx.floats8(_F)), tl.constexpr(ptx.floats8(_B))
_SPARSE_F, _SPARSE_B = tl.constexpr(ptx.sparse4(_F, False)), tl.constexpr(ptx.sparse4(_B, False))
_SPARSE_F2, _SPARSE_B2 = tl.constexpr(ptx.sparse4(_F, True)), tl.constexpr(ptx.sparse4(_B, True))
_MINUS_F, _MINUS_B = tl.constexpr(ptx.minus(_F)), tl.constexpr(ptx.minus(_B))
_TIMES_F, _TIMES_B = tl.constexpr(ptx.times(_F)), tl.constexpr(ptx.times(_B))
# Triton takes several outputs' types only as one constant.
_ONE_F, _ONE_B = tl.constexpr((tl.float16,)), tl.constexpr((tl.bfloat16,))
_TWO_F, _TWO_B = tl.constexpr((tl.float16,) * 2), tl.constexpr((tl.bfloat16,) * 2)
_FOUR_F, _FOUR_B = tl.constexpr((tl.float16,) * 4), tl.constexpr((tl.bfloat16,) * 4)
_EIGHT_F, _EIGHT_B = tl.constexpr((tl.float16,) * 8), tl.constexpr((tl.bfloat16,) * 8)
_SIGNS = tl.constexpr(tuple(sign for sign, _ in ptx.FLOAT4_PLACES))
_RESTS = tl.constexpr(tuple(rest for _, rest in ptx.FLOAT4_PLACES))


@triton.jit
def load_words(pointer, place, BN: tl.constexpr, ONCE: tl.constexpr):
    """``[BN, 16]`` words that lie together from ``place`` on, in the order of the threads; ``ONCE`` if nobody else reads them."""
    lane = tl.arange(0, BN * 2)
    words = tl.load(
        pointer + (place + lane[:, None] * 8 + tl.arange(0, 8)[None, :]),
        eviction_policy="evict_first" if ONCE else "",
    )
    # For each 16 rows: row, pair of columns, half of the columns, half of the rows, column of the pair.
    words = tl.permute(tl.reshape(words, [BN // 16, 8, 4, 2, 2, 2]), [0, 4, 1, 3, 2, 5])
    return tl.reshape(words, [BN, 16])


@triton.jit
def side_by_side(a, b, c, d):
    """Four ``[BN, 16]`` as ``[BN, 64]``.

    Nothing moves between threads for Hopper's products; for older ones, which narrow tiles take, Triton then wants another
    order, and words go through shared memory. slices.py does without.
    """
    together = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(together, [0, 2, 3, 1]), [a.shape[0], 64])


@triton.jit
def minus(a, b, HALF: tl.constexpr, ASM: tl.constexpr):
    """``a - b``, two at a time."""
    if ASM:
        code: tl.constexpr = _MINUS_B if HALF == tl.bfloat16 else _MINUS_F
        types: tl.constexpr = _ONE_B if HALF == tl.bfloat16 else _ONE_F
        return tl.inline_asm_elementwise(code, "=&r,r,r", [a, b], dtype=types, is_pure=True, pack=2)[0]
    return (a.to(tl.float32) - b.to(tl.float32)).to(HALF)


@triton.jit
def times(a, b, HALF: tl.constexpr, ASM: tl.constexpr):
    """``a * b``, two at a time."""
    if ASM:
        code: tl.constexpr = _TIMES_B if HALF == tl.bfloat16 else _TIMES_F
        types: tl.constexpr = _ONE_B if HALF == tl.bfloat16 else _ONE_F
        return tl.inline_asm_elementwise(code, "=&r,r,r", [a, b], dtype=types, is_pure=True, pack=2)[0]
    return (a.to(tl.float32) * b.to(tl.float32)).to(HALF)


@triton.jit
def _eight(code: tl.constexpr, words, others, HALF: tl.constexpr):
    types: tl.constexpr = _EIGHT_B if HALF == tl.bfloat16 else _EIGHT_F
    return tl.inline_asm_elementwise(
        code,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [words, others],
        dtype=types,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _field(words, place: tl.constexpr, bits: tl.constexpr):
    return (words.to(tl.int32) >> place) & ((1 << bits) - 1)


@triton.jit
def _whole(words, place: tl.constexpr, bits: tl.constexpr, HALF: tl.constexpr):
    return (_field(words, place, bits) - (1 << (bits - 1))).to(tl.float32).to(HALF)


@triton.jit
def int2(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Eight codes of each word."""
    if ASM:
        code: tl.constexpr = _INT2_B if HALF == tl.bfloat16 else _INT2_F
        types: tl.constexpr = _EIGHT_B if HALF == tl.bfloat16 else _EIGHT_F
        return tl.inline_asm_elementwise(
            code,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [words],
            dtype=types,
            is_pure=True,
            pack=2,
        )
    return (
        _whole(words, 0, 2, HALF),
        _whole(words, 2, 2, HALF),
        _whole(words, 4, 2, HALF),
        _whole(words, 6, 2, HALF),
        _whole(words, 8, 2, HALF),
        _whole(words, 10, 2, HALF),
        _whole(words, 12, 2, HALF),
        _whole(words, 14, 2, HALF),
    )


@triton.jit
def int4(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Four codes of each word."""
    if ASM:
        code: tl.constexpr = _INT4_B if HALF == tl.bfloat16 else _INT4_F
        types: tl.constexpr = _FOUR_B if HALF == tl.bfloat16 else _FOUR_F
        return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,r", [words], dtype=types, is_pure=True, pack=2)
    return _whole(words, 0, 4, HALF), _whole(words, 4, 4, HALF), _whole(words, 8, 4, HALF), _whole(words, 12, 4, HALF)


@triton.jit
def int8(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Two codes of each word."""
    if ASM:
        code: tl.constexpr = _INT8_B if HALF == tl.bfloat16 else _INT8_F
        types: tl.constexpr = _TWO_B if HALF == tl.bfloat16 else _TWO_F
        return tl.inline_asm_elementwise(code, "=&r,=&r,r", [words], dtype=types, is_pure=True, pack=2)
    return _whole(words, 0, 8, HALF), _whole(words, 8, 8, HALF)


@triton.jit
def _of_planes(upper, lower, place: tl.constexpr, HALF: tl.constexpr):
    return ((_field(upper, place, 4) << 4 | _field(lower, place, 4)) - 128).to(tl.float32).to(HALF)


@triton.jit
def nested8(upper, lower, HALF: tl.constexpr, ASM: tl.constexpr):
    """Four codes of 8 bits, whose halves are in two words."""
    if ASM:
        code: tl.constexpr = _NESTED_B if HALF == tl.bfloat16 else _NESTED_F
        types: tl.constexpr = _FOUR_B if HALF == tl.bfloat16 else _FOUR_F
        return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,r,r", [upper, lower], dtype=types, is_pure=True, pack=2)
    return (
        _of_planes(upper, lower, 0, HALF),
        _of_planes(upper, lower, 4, HALF),
        _of_planes(upper, lower, 8, HALF),
        _of_planes(upper, lower, 12, HALF),
    )


@triton.jit
def _middle(words, place: tl.constexpr, HALF: tl.constexpr):
    return (_field(words, place, 4) * 16 - 120).to(tl.float32).to(HALF)


@triton.jit
def upper4(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """For each of four codes the middle of all that share its upper four bits."""
    if ASM:
        code: tl.constexpr = _UPPER_B if HALF == tl.bfloat16 else _UPPER_F
        types: tl.constexpr = _FOUR_B if HALF == tl.bfloat16 else _FOUR_F
        return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,r", [words], dtype=types, is_pure=True, pack=2)
    return _middle(words, 0, HALF), _middle(words, 4, HALF), _middle(words, 8, HALF), _middle(words, 12, HALF)


@triton.jit
def _three(low, high, I: tl.constexpr, SECOND: tl.constexpr, HALF: tl.constexpr):
    top: tl.constexpr = (2 * I + 2) % 16 + (1 if SECOND else 0)
    return ((_field(low, 2 * I, 2) | _field(high, top, 1) << 2) - 4).to(tl.float32).to(HALF)


@triton.jit
def int3(low, high, SECOND: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Eight codes: two bits of each in ``low``, the third in ``high``, of which every second bit is meant."""
    if ASM:
        if SECOND:
            later: tl.constexpr = _INT3_B2 if HALF == tl.bfloat16 else _INT3_F2
            return _eight(later, low, high, HALF)
        else:
            code: tl.constexpr = _INT3_B if HALF == tl.bfloat16 else _INT3_F
            return _eight(code, low, high, HALF)
    return (
        _three(low, high, 0, SECOND, HALF),
        _three(low, high, 1, SECOND, HALF),
        _three(low, high, 2, SECOND, HALF),
        _three(low, high, 3, SECOND, HALF),
        _three(low, high, 4, SECOND, HALF),
        _three(low, high, 5, SECOND, HALF),
        _three(low, high, 6, SECOND, HALF),
        _three(low, high, 7, SECOND, HALF),
    )


@triton.jit
def _small_float(words, I: tl.constexpr, HALF: tl.constexpr):
    sign: tl.constexpr = _SIGNS[I]
    rest: tl.constexpr = _RESTS[I]
    # The exponent's bias is 1, and a float32 has 22 more bits of mantissa: a number of exponent 0 stays subnormal.
    bits = _field(words, sign, 1) << 31 | _field(words, rest, 3) << 22
    # Halves are exact; in float32 the product of a subnormal number would depend on how the device treats those.
    magnitude = _field(words, rest, 3)
    small = magnitude.to(tl.float32) * 0.5
    exact = tl.where(magnitude < 2, small, ((bits & 0x7FFFFFFF) + (126 << 23)).to(tl.float32, bitcast=True))
    return tl.where(_field(words, sign, 1) != 0, -exact, exact).to(HALF)


@triton.jit
def float4(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Four e2m1 numbers of each word."""
    if ASM:
        code: tl.constexpr = _FLOAT4_B if HALF == tl.bfloat16 else _FLOAT4_F
        types: tl.constexpr = _FOUR_B if HALF == tl.bfloat16 else _FOUR_F
        return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,r", [words], dtype=types, is_pure=True, pack=2)
    return (
        _small_float(words, 0, HALF),
        _small_float(words, 1, HALF),
        _small_float(words, 2, HALF),
        _small_float(words, 3, HALF),
    )


@triton.jit
def e4m3_to_float32(code):
    """The value of e4m3 bits in an int32; NaN is not known."""
    magnitude = code & 0x7F
    # Below 2^-6 numbers are multiples of 2^-9.
    value = tl.where(
        magnitude < 8,
        magnitude.to(tl.float32) * 0.001953125,
        ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True),
    )
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def float8(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Two e4m3 numbers of each word."""
    if ASM:
        code: tl.constexpr = _FLOAT8_B if HALF == tl.bfloat16 else _FLOAT8_F
        types: tl.constexpr = _TWO_B if HALF == tl.bfloat16 else _TWO_F
        return tl.inline_asm_elementwise(code, "=&r,=&r,r", [words], dtype=types, is_pure=True, pack=2)
    return e4m3_to_float32(_field(words, 0, 8)).to(HALF), e4m3_to_float32(_field(words, 8, 8)).to(HALF)


@triton.jit
def _placed(values, places, GROUP: tl.constexpr, NIBBLE: tl.constexpr, HALF: tl.constexpr):
    first, last = _field(values, 8 * GROUP, 4) - 8, _field(values, 8 * GROUP + 4, 4) - 8
    zero = tl.zeros_like(first)
    here = _field(places, NIBBLE, 4)
    lower = tl.where((here & 1) != 0, last, first)
    upper = tl.where((here & 8) != 0, first, last)
    return (
        tl.where((here & 1) != 0, first, zero).to(tl.float32).to(HALF),
        tl.where((here & 2) != 0, lower, zero).to(tl.float32).to(HALF),
        tl.where((here & 4) != 0, upper, zero).to(tl.float32).to(HALF),
        tl.where((here & 8) != 0, last, zero).to(tl.float32).to(HALF),
    )


@triton.jit
def sparse4(values, places, SECOND: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Two groups of four weights each; ``SECOND`` takes the places in the upper half of ``places``."""
    if ASM:
        if SECOND:
            later: tl.constexpr = _SPARSE_B2 if HALF == tl.bfloat16 else _SPARSE_F2
            return _eight(later, values, places, HALF)
        else:
            code: tl.constexpr = _SPARSE_B if HALF == tl.bfloat16 else _SPARSE_F
            return _eight(code, values, places, HALF)
    a = _placed(values, places, 0, 8 if SECOND else 0, HALF)
    b = _placed(values, places, 1, 12 if SECOND else 4, HALF)
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]
