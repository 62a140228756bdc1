"""Packing weights in the kernels' layout, once when a model is loaded.

A tensor core's left operand has 16 by 16 elements, of which each of 32 threads holds 8. A *fragment* is
256 words of 16 bits in that order, so each thread reads its 16 bytes at once; a word holds several codes,
each for another 16 columns. Fragments of all rows for the same columns are contiguous, in the order in
which programs read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..tiles.tile import FILLED
from .ptx import FLOAT4_PLACES

ROWS = FILLED  # rows are filled up to this
SPAN = 256  # and columns to this


@dataclass(frozen=True)
class Format:
    """The packing of one kind of codes.

    Attributes:
        name: its name in kernels.
        bits: per weight, without scales.
        block: columns that are unpacked together.
    """

    name: str
    bits: int
    block: int


FORMATS = {
    form.name: form
    for form in (
        Format("int2", 2, 128),
        Format("int3", 3, 256),
        Format("int4", 4, 64),
        Format("int8", 8, 64),
        Format("float4", 4, 64),
        Format("float8", 8, 64),
        Format("sparse4", 3, 256),
        # Codes of 8 bits whose upper and lower halves are two planes; and of those the upper one.
        Format("nested8", 8, 64),
        Format("upper4", 4, 64),
    )
}


def pack(codes: Tensor, form: str) -> list[Tensor]:
    """Codes ``[rows, columns]`` as int16 fragments.

    Args:
        codes: signed integers for int formats, ``nested8``, ``upper4`` (of 8 bits, too) and ``sparse4`` (where two of each
            four are zero); the bits of each value for float formats.
        form: one of :data:`FORMATS`.

    Returns:
        One tensor, or two for formats that have two planes.
    """
    rows, columns = codes.shape
    full = torch.nn.functional.pad(codes.to(torch.int32), (0, -columns % SPAN, 0, -rows % ROWS))
    if form == "int3":
        unsigned = full + 4
        return [_fragments(_words(unsigned & 3, 2)), _fragments(_third_bits(unsigned >> 2))]
    if form == "sparse4":
        values, places = _two_of_four(full)
        return [_fragments(values), _fragments(places)]
    if form in ("nested8", "upper4"):
        unsigned = full + 128
        planes = [unsigned >> 4, unsigned & 15] if form == "nested8" else [unsigned >> 4]
        return [_fragments(_words(plane, 4)) for plane in planes]
    if form == "float4":
        return [_fragments(_small_floats(full))]
    bits = FORMATS[form].bits
    return [_fragments(_words(full & 255 if form == "float8" else full + (1 << (bits - 1)), bits))]


@dataclass(frozen=True)
class ScaleKind:
    """The packing of group scales in 32-bit words.

    Attributes:
        name: its name in kernels.
        groups: per word.
    """

    name: str
    groups: int


SCALES = {
    kind.name: kind
    for kind in (
        ScaleKind("none", 0),
        ScaleKind("half", 2),  # float16 or bfloat16
        ScaleKind("zero", 1),  # the same, with the zero-point in the upper half
        ScaleKind("full", 1),  # float32
        ScaleKind("e8m0", 4),
        ScaleKind("e4m3", 4),
    )
}
_GROUPS = (128, 64, 32, 16)


def kernel_group(group: int) -> int | None:
    """The kernels' group size for weights with groups of ``group`` columns; None if unsupported."""
    return next((size for size in _GROUPS if group % size == 0), None)


def pack_scales(scale: Tensor, zero: Tensor | None, group: int) -> tuple[str, Tensor]:
    """Scales ``[rows, groups]`` as 32-bit words ``[words, rows]``, and their kind.

    Args:
        scale: float16, bfloat16 or float32; or e8m0 or e4m3 (the bits as uint8 or the type itself).
        zero: integers to subtract from codes before they are scaled; only with 16-bit scales.
        group: columns that share a scale, a multiple of :func:`kernel_group`.
    """
    part = kernel_group(group)
    if part is None:
        raise ValueError(f"groups of {group} columns; kernels take multiples of {_GROUPS[-1]}")
    kind, bits = _bits_of(scale)
    if zero is not None:
        if kind != "half":
            raise ValueError("zero-points need 16-bit scales")
        kind, bits = "zero", bits & 0xFFFF | (zero.to(torch.int64) & 0xFFFF) << 16
    bits = bits.repeat_interleave(group // part, dim=1)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % (SPAN // part), 0, -bits.shape[0] % ROWS))
    share = SCALES[kind].groups
    width = 32 // share
    places = torch.arange(share, device=bits.device) * width
    words = ((bits.view(bits.shape[0], -1, share) & ((1 << width) - 1)) << places).sum(2)
    return kind, torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).T.contiguous()


def _bits_of(scale: Tensor) -> tuple[str, Tensor]:
    if scale.dtype in (torch.float16, torch.bfloat16):
        return "half", scale.contiguous().view(torch.int16).to(torch.int64)
    if scale.dtype == torch.float32:
        return "full", scale.contiguous().view(torch.int32).to(torch.int64)
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        return "e8m0", scale.view(torch.uint8).to(torch.int64)
    if scale.dtype == torch.float8_e4m3fn:
        return "e4m3", scale.view(torch.uint8).to(torch.int64)
    raise ValueError(f"scales of {scale.dtype} are not supported")


def interleaved(rows: int) -> Tensor:
    """The order of a gate's and its inputs' rows, stacked, that puts each pair into the same thread: 8 of one, 8 of the other."""
    if rows % 16:
        raise ValueError(f"a fused gate has {rows} rows; kernels take multiples of 16")
    return torch.arange(rows).view(2, rows // 16, 8).transpose(0, 1).flatten()


def _columns(codes: Tensor, pieces: int) -> Tensor:
    """``[rows, columns]`` as ``[rows, blocks, pieces, 16]``."""
    return codes.view(codes.shape[0], -1, pieces, 16)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes as ``[rows, blocks, 16]`` words; the codes of one are 16 columns apart."""
    pieces = 16 // bits
    places = torch.arange(pieces, device=codes.device, dtype=torch.int32) * bits
    return (_columns(codes, pieces) << places[:, None]).sum(2)


def _third_bits(bits: Tensor) -> Tensor:
    places = [(2 * i + 2) % 16 + half for half in range(2) for i in range(8)]
    return (_columns(bits, 16) << torch.tensor(places, device=bits.device, dtype=torch.int32)[:, None]).sum(2)


def _small_floats(codes: Tensor) -> Tensor:
    pieces = _columns(codes, 4)
    signs, rests = (torch.tensor(p, device=codes.device, dtype=torch.int32) for p in zip(*FLOAT4_PLACES, strict=True))
    return ((pieces >> 3 & 1) << signs[:, None] | (pieces & 7) << rests[:, None]).sum(2)


def is_two_of_four(codes: Tensor) -> bool:
    """Whether of every four neighbours in a row at least two are zero."""
    return codes.shape[1] % 4 == 0 and int((codes.unflatten(1, (-1, 4)) != 0).sum(2, dtype=torch.uint8).max()) <= 2


def _two_of_four(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Words of values and of places. Of a group's four weights each is in another piece, so columns are ordered for it."""
    rows = codes.shape[0]
    groups = codes.view(rows, -1, 4)
    kept = groups != 0
    if not is_two_of_four(codes):
        raise ValueError("a weight is not 2:4 sparse: a group of four has more than two nonzeros")
    # Zeros fill up groups with fewer than two.
    order = torch.sort(kept.to(torch.int8), dim=2, descending=True, stable=True).indices[:, :, :2].sort(2).values
    places = (1 << order).sum(2)
    values = groups.gather(2, order) + 8
    pairs = (values[:, :, 0] | values[:, :, 1] << 4).to(torch.int32)
    # A slab of 64 columns is 16 groups, one for each of the fragment's columns.
    nibbles = torch.arange(4, device=codes.device, dtype=torch.int32) * 4
    return (
        (pairs.view(rows, -1, 2, 16) << (nibbles[:2] * 2)[:, None]).sum(2),
        (places.to(torch.int32).view(rows, -1, 4, 16) << nibbles[:, None]).sum(2),
    )


def _fragments(words: Tensor) -> Tensor:
    """``[rows, blocks, 16]`` as ``[blocks, rows / 16, row, pair, half of columns, half of rows, column]``, of int16."""
    rows, blocks, _ = words.shape
    split = words.to(torch.int32).view(rows // 16, 2, 8, blocks, 2, 4, 2)
    ordered = split.permute(3, 0, 2, 5, 4, 1, 6).reshape(blocks, rows * 16)
    # Values from 32768 on wrap around to negative ones with the same bits.
    return torch.where(ordered >= 1 << 15, ordered - (1 << 16), ordered).to(torch.int16).contiguous()
