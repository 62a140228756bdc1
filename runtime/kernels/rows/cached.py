"""The storage of a paged KV cache on a GPU: rows of values, or of codes with one scale per row."""

# Triton's functions are not typed as what they are inside of one.
# pyright: reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...cache_types import BY_KIND
from ..base.launch import interpreted
from .quantize_rows import TARGETS_OF, rounded, scale_of


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Attributes:
        keys, values: ``[blocks, heads, positions of a block, size]``; of packed kinds two codes to a byte, the first one low.
        key_scales, value_scales: float32 ``[blocks, heads, positions of a block]``; None if unquantized.
        kind: one of :data:`.cache_types.BY_KIND`.
        size: of a head.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    kind: str
    size: int

    @property
    def heads(self) -> int:
        """Key-value heads."""
        return self.keys.shape[1]

    @property
    def block(self) -> int:
        """Positions in a block."""
        return self.keys.shape[2]

    def parts(self) -> list[Tensor]:
        """All of its memory."""
        return [part for part in (self.keys, self.values, self.key_scales, self.value_scales) if part is not None]

    def blocks(self, first: int, last: int) -> LayerCache:
        """Some of its blocks, in the same memory."""
        names = ("keys", "values", "key_scales", "value_scales")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if part is None else part[first:last] for name, part in parts.items()})

    def copied(self) -> LayerCache:
        """The same in other memory."""
        names = ("keys", "values", "key_scales", "value_scales")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if part is None else part.clone() for name, part in parts.items()})

    def arguments(self) -> dict[str, Tensor | int | None]:
        """For the kernels."""
        return {name: getattr(self, name) for name in ("keys", "values", "key_scales", "value_scales")}

    def constants(self) -> dict[str, object]:
        """For the kernels."""
        return {
            "D": self.size,
            "DP": padded(self.size),
            "SHARED": self.heads,
            "BLOCK": self.block,
            "KIND": self.kind.removesuffix(" fnuz"),
        }

    def rotated(self) -> int:
        """The size of the key's rotation; 0 for none."""
        return min(64, self.size & -self.size) if BY_KIND[self.kind].rotated else 0


def layer_cache(
    blocks: int, heads: int, block: int, size: int, kind: str, dtype: torch.dtype, device: torch.device | str
) -> LayerCache:
    """An empty one."""
    width = size // BY_KIND[kind].codes_per_byte
    stored = BY_KIND[kind].stored_dtype(dtype)
    keys, values = (torch.zeros(blocks, heads, block, width, dtype=stored, device=device) for _ in range(2))
    if BY_KIND[kind].limit is None:
        return LayerCache(keys, values, None, None, kind, size)
    key_scales, value_scales = (torch.zeros(blocks, heads, block, device=device) for _ in range(2))
    return LayerCache(keys, values, key_scales, value_scales, kind, size)


def targets_of(kind: str) -> tuple[str, ...]:
    """The targets that support a kind; empty for all."""
    codes = BY_KIND[kind].stored_dtype(torch.float32)
    return TARGETS_OF[codes] if codes.is_floating_point and codes.itemsize == 1 else ()


def padded(size: int) -> int:
    """A head's size, padded for tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


def rotation(size: int, together: int, device: torch.device | str) -> Tensor:
    """The orthogonal matrix that rotates keys and their queries: a block-diagonal Hadamard matrix."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < together:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / together**0.5] * (size // together)).to(device)


def restored(codes: Tensor, scales: Tensor | None, kind: str) -> Tensor:
    """float64 values of codes ``[..., width]``; rotated keys stay so."""
    if BY_KIND[kind].packed:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int16) - 8
    return codes.double() if scales is None else codes.double() * scales.double().unsqueeze(-1)


@triton.jit
def cached_rows(table, start, stop, head, SHARED: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr):
    """Where ``BN`` positions from ``start`` on, a multiple of ``BN``, are kept; a layer's rows are numbered in 32 bits."""
    inner = tl.arange(0, BN)
    if BLOCK % BN == 0:
        # One block has them all.
        block = tl.load(table + start // BLOCK)
        return (block * SHARED + head) * BLOCK + start % BLOCK + inner
    elif BN % BLOCK == 0:
        # A few whole blocks: their numbers are read once, not by each position.
        number = start // BLOCK + tl.arange(0, BN // BLOCK)
        blocks = tl.load(table + number, mask=number * BLOCK < stop, other=0)
        rows = ((blocks * SHARED + head) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        return tl.max_contiguous(tl.multiple_of(tl.reshape(rows, [BN]), BLOCK), BLOCK)
    else:
        positions = start + inner
        blocks = tl.load(table + positions // BLOCK, mask=positions < stop, other=0)
        return (blocks * SHARED + head) * BLOCK + positions % BLOCK


# Bits of small integers in float16 differ from those of 1024 and more by the exponent only, so that four bytes, or eight
# nibbles, become numbers by moving bits and one subtraction for two of them; two numbers of a word are neighbours already.
_BYTES_PTX = tl.constexpr("""{
    .reg .b32 all, high, zero;
    xor.b32 all, $2, 0x80808080;
    mov.b32 high, 0x64646464;
    mov.b32 zero, 0x64806480;
    prmt.b32 $0, all, high, 0x4140;
    prmt.b32 $1, all, high, 0x4342;
    sub.f16x2 $0, $0, zero;
    sub.f16x2 $1, $1, zero;
}""")
_NIBBLES_PTX = tl.constexpr("""{
    .reg .b32 upper, zero;
    shr.b32 upper, $4, 4;
    mov.b32 zero, 0x64086408;
    prmt.b32 $0, $4, upper, 0x4400;
    prmt.b32 $1, $4, upper, 0x5511;
    prmt.b32 $2, $4, upper, 0x6622;
    prmt.b32 $3, $4, upper, 0x7733;
    lop3.b32 $0, $0, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $1, $1, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $2, $2, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $3, $3, 0x000F000F, 0x64006400, 0xEA;
    sub.f16x2 $0, $0, zero;
    sub.f16x2 $1, $1, zero;
    sub.f16x2 $2, $2, zero;
    sub.f16x2 $3, $3, zero;
}""")


@triton.jit
def _side_by_side(low, high, DP: tl.constexpr):
    """A pair's numbers become neighbours, which moves nothing between threads."""
    return tl.reshape(tl.join(low, high), [low.shape[0], DP])


@triton.jit
def _halves_of_words(words, DP: tl.constexpr):
    """The two float16 that each 32 bits hold; nothing is computed for that."""
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return _side_by_side(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True), DP)


@triton.jit
def _halves_of_nibbles(codes, DP: tl.constexpr, ASM: tl.constexpr):
    """float16 of bytes that hold two codes."""
    if ASM:
        # Triton makes the threads' shares of a product as wide as it takes to load them whole, and of fewer than 32 nibbles
        # in a row or column wider than the product is, which gives wrong sums (its pull request 11691). It does not look
        # for loads behind what is not pure.
        PURE: tl.constexpr = codes.shape[0] >= 32 and DP >= 32  # pyright: ignore[reportAssignmentType]
        words = tl.inline_asm_elementwise(
            _NIBBLES_PTX, "=&r,=&r,=&r,=&r,r", [codes], dtype=tl.int32, is_pure=PURE, pack=4
        )
        return _halves_of_words(words, DP)
    else:
        both = _side_by_side(codes & 15, codes >> 4, DP)
        return (both.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0


@triton.jit
def _halves_of_bytes(pairs, CODE: tl.constexpr, DP: tl.constexpr, ASM: tl.constexpr):
    """float16 of words that hold two codes of 8 bits."""
    if CODE == tl.int8 and ASM:
        words = tl.inline_asm_elementwise(_BYTES_PTX, "=&r,=&r,r", [pairs], dtype=tl.int32, is_pure=True, pack=2)
        return _halves_of_words(words, DP)
    else:
        both = _side_by_side(pairs.to(tl.int8), (pairs >> 8).to(tl.int8), DP)
        return both.to(CODE, bitcast=True).to(tl.float16)


@triton.jit
def numbers_of(
    codes,
    rows,
    valid,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    AS: tl.constexpr,
    ASM: tl.constexpr,
    ACROSS: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):
    """``[positions, DP]`` numbers, not yet scaled, of cached rows; or ``[DP, positions]``, where they go ``ACROSS``."""
    # Codes are read two together: numbers of one byte would be gathered byte by byte on their way to a product.
    WIDTH: tl.constexpr = D if KIND == "plain" else D // 2  # pyright: ignore[reportAssignmentType]
    FILLED: tl.constexpr = DP if KIND == "plain" else DP // 2  # pyright: ignore[reportAssignmentType]
    columns = tl.arange(0, FILLED)
    CODE: tl.constexpr = codes.dtype.element_ty
    if KIND == "plain" or KIND == "int4":
        words = codes
    else:
        words = codes.to(tl.pointer_type(tl.int16), bitcast=True)
    # Numbers that need no unpacking go from memory to a product in the shape they are loaded in.
    POSITIONS: tl.constexpr = 0 if KIND == "plain" and ACROSS else 1  # pyright: ignore[reportAssignmentType]
    columns = tl.expand_dims(columns, 1 - POSITIONS)
    pointers = words + tl.expand_dims(rows.to(tl.int64), POSITIONS) * WIDTH + columns
    if MASKED:
        found = tl.load(pointers, mask=tl.expand_dims(valid, POSITIONS) & (columns < WIDTH), other=0.0)
    elif WIDTH != FILLED:
        found = tl.load(pointers, mask=columns < WIDTH, other=0.0)
    else:
        found = tl.load(pointers)
    if KIND == "int4":
        found = _halves_of_nibbles(found, DP, ASM)
    elif KIND != "plain":
        found = _halves_of_bytes(found, CODE, DP, ASM)
    if KIND != "plain" and ACROSS:
        found = tl.trans(found)
    return found.to(AS)


@triton.jit
def store_key_and_value(
    tile,
    keys,
    values,
    key_scales,
    value_scales,
    place,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Of a float32 tile ``[rows, DP]`` of queries, a key and a value, keep the last two at ``place``."""
    ROWS: tl.constexpr = tile.shape[0]
    row = tl.arange(0, ROWS)
    is_key = row == GROUP
    is_value = row == GROUP + 1
    if KIND == "plain":
        columns = tl.arange(0, DP)
        inside = (columns < D)[None, :]
        to = place * D + columns[None, :] + tl.zeros([ROWS, 1], tl.int32)
        found = tile.to(keys.dtype.element_ty)
        tl.store(keys + to, found, mask=is_key[:, None] & inside)
        tl.store(values + to, found, mask=is_value[:, None] & inside)
    else:
        scale = scale_of(tl.abs(tile), 1, LIMIT)
        at = place + tl.zeros([ROWS], tl.int32)
        tl.store(key_scales + at, scale, mask=is_key)
        tl.store(value_scales + at, scale, mask=is_value)
        WIDTH: tl.constexpr = D // 2 if KIND == "int4" else D  # pyright: ignore[reportAssignmentType]
        FILLED: tl.constexpr = DP // 2 if KIND == "int4" else DP  # pyright: ignore[reportAssignmentType]
        columns = tl.arange(0, FILLED)
        inside = (columns < WIDTH)[None, :]
        to = place * WIDTH + columns[None, :] + tl.zeros([ROWS, 1], tl.int32)
        if KIND == "int4":
            whole = tl.div_rn(tile, scale[:, None] + tl.zeros_like(tile))
            whole = (whole + 12582912.0) - 12582912.0
            whole = tl.minimum(tl.maximum(whole, -8.0), 7.0) + 8.0
            # -7.5 lies between two codes; quant/row_rounding.py says why it gets the lowest.
            largest = tl.max(tl.abs(tile), 1)[:, None]
            whole = tl.where((tile == -largest) & (largest > 0.0), 0.0, whole)
            low, high = tl.split(tl.reshape(whole.to(tl.int32), [ROWS, FILLED, 2]))
            found = (low | (high << 4)).to(tl.uint8)
        else:
            found = rounded(tile, scale[:, None], keys.dtype.element_ty, LIMIT, SOFT)
        tl.store(keys + to, found, mask=is_key[:, None] & inside)
        tl.store(values + to, found, mask=is_value[:, None] & inside)


def storing(cache: LayerCache) -> dict[str, object]:
    """Constants of :func:`store_key_and_value`."""
    return {"LIMIT": BY_KIND[cache.kind].limit or 0.0, "SOFT": interpreted()}
