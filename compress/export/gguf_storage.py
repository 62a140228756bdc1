"""How each weight is stored in a GGUF file: in the type that holds its codes unchanged, or quantized again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from ...runtime.weights.matrix import Matrix
from .gguf_layouts import BY_NAME, LAYOUTS, BlockLayout, Blocks, joined
from .gguf_rounding import rounded

EXACT, RESCALED, REQUANTIZED = "exact", "rescaled", "requantized"

_FLOATS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
_TORCH = {kind.name: dtype for dtype, kind in _FLOATS.items()}
# Fallbacks for rows that are not whole blocks of a type, smallest first.
_NARROWER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q6_K": "Q8_0"}
# The relative error of weights that are zero or infinite in float16, the dtype of block scales.
_LOST = 0.9
_AT_ONCE = 1 << 20  # elements encoded at a time


@dataclass(frozen=True)
class GGUFType:
    """One way to store a whole model.

    Attributes:
        linear: the type of linears; None for the one that holds each exactly.
        table: the type of the embedding and lm_head; None for their own.
        file_type: GGUF's number for it.
    """

    linear: str | None
    table: str | None
    file_type: int


KINDS = {
    "F32": GGUFType("F32", "F32", 0),
    "F16": GGUFType("F16", "F16", 1),
    "BF16": GGUFType("BF16", "BF16", 32),
    "Q8_0": GGUFType("Q8_0", "Q8_0", 7),
    "Q6_K": GGUFType("Q6_K", "Q6_K", 18),
    "Q5_0": GGUFType("Q5_0", "Q6_K", 8),
    "Q4_K": GGUFType("Q4_K", "Q6_K", 14),
    "Q4_1": GGUFType("Q4_1", "Q6_K", 3),
    "Q4_0": GGUFType("Q4_0", "Q6_K", 2),
    "Q3_K": GGUFType("Q3_K", "Q6_K", 11),
    "Q2_K": GGUFType("Q2_K", "Q6_K", 10),
}
AUTO = GGUFType(None, None, 1024)


@dataclass(frozen=True)
class StoredTensor:
    """A weight as bytes.

    Attributes:
        type: which of GGUF's types.
        data: uint8 ``[rows, bytes of a row]``.
        how: ``exact``: its codes and scales, or its values, are unchanged; ``rescaled``: the codes are, scales were
            rounded to float16; ``requantized``.
        error: the relative RMS error that this added.
        factor: float32 ``[rows]``, an additional multiplier; None for ones.
    """

    type: GGMLQuantizationType
    data: np.ndarray
    how: str
    error: float
    factor: Tensor | None = None


def stored(matrix: Matrix, wanted: str | None) -> StoredTensor:
    """A weight in a type, or in the smallest that holds it exactly.

    Args:
        matrix: the weight.
        wanted: a type; None for the best.
    """
    floats = None if wanted is not None else _small_floats(matrix)
    if floats is not None:
        return floats
    if wanted is None and matrix.is_plain:
        return _plain(matrix, None)
    candidates = [_fitting(wanted, matrix.shape[1])] if wanted else [layout.name for layout in LAYOUTS]
    layouts = [BY_NAME[name] for name in candidates if name in BY_NAME]
    for tolerant in (False, True):
        for layout in layouts:
            found = _carried(matrix, layout, tolerant)
            if found is not None:
                return found
    # Codes that no type holds lose little in a type with some more bits.
    name = candidates[0] if wanted else _fitting("Q6_K" if _bits(matrix) <= 4 else "Q8_0", matrix.shape[1])
    found = _plain(matrix, name) if name in _TORCH else _requantized(matrix, BY_NAME[name])
    return found if found.error < _LOST else _plain(matrix, "BF16")


def holding(matrix: Matrix, layout: BlockLayout, tolerant: bool = False) -> Blocks | None:
    """A quantized weight's codes in a layout; None if it cannot hold them.

    Args:
        matrix: the weight.
        layout: the target layout.
        tolerant: scales and minima may be rounded to float16.
    """
    if matrix.scale is None or matrix.order is not None or matrix.group % layout.size:
        return None
    codes, groups = matrix.values.short(), matrix.scale.shape[1]
    zero = torch.zeros(1, 1) if matrix.zero is None else matrix.zero
    zero = zero.short().expand(matrix.shape[0], groups)
    if layout.affine:
        shift = 2 ** (matrix.bits - 1)
        codes, zero = codes + shift, zero + shift
    else:
        codes = (codes.unflatten(1, (groups, -1)) - zero.unsqueeze(-1)).flatten(1)
    if int(codes.min()) < layout.low or int(codes.max()) > layout.high:
        return None
    codes = codes.reshape(-1, layout.size)
    each = matrix.group // layout.size
    wide = matrix.scale.float()
    # The scale of an all-zero group does not matter.
    wide = torch.where(_is_zero(codes, zero, layout, wide.shape), torch.zeros_like(wide), wide)
    scale = _half(wide, tolerant)
    if scale is None:
        return None

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(each, 1).flatten()

    if layout.part:
        parts = layout.size // layout.part
        one = torch.ones(len(codes), parts, dtype=torch.int32)
        if not layout.affine:
            return Blocks(codes, spread(scale), part_scale=one)
        if int(zero.min()) < 0 or int(zero.max()) > layout.part_high:
            return None
        least = spread(zero).to(torch.int32)[:, None].expand(-1, parts)
        return Blocks(codes, spread(scale), spread(-scale), one, least)
    if not layout.affine:
        return Blocks(codes, spread(scale))
    minimum = _half(-scale.float() * zero.float(), tolerant)
    return None if minimum is None else Blocks(codes, spread(scale), spread(minimum))


def _is_zero(codes: Tensor, zero: Tensor, layout: BlockLayout, shape: torch.Size) -> Tensor:
    """Which groups hold zeros only."""
    grouped = codes.view(*shape, -1)
    return (grouped == (zero.unsqueeze(-1) if layout.affine else 0)).all(-1)


def _half(values: Tensor, tolerant: bool) -> Tensor | None:
    """Values in float16; None if they are not exact."""
    half = values.half()
    lost = (half == 0) & (values != 0) if tolerant else half.float() != values
    return None if bool(lost.any()) or not bool(half.isfinite().all()) else half


def _carried(matrix: Matrix, layout: BlockLayout, tolerant: bool) -> StoredTensor | None:
    data, error, total = [], 0.0, 0.0
    for part in _parts(matrix):
        blocks = holding(part, layout, tolerant)
        if blocks is None:
            return None
        data.append(_rows(layout.pack(blocks), part))
        if tolerant:
            error, total = _added(error, total, blocks, part)
    return StoredTensor(layout.type, np.concatenate(data), RESCALED if tolerant else EXACT, _relative(error, total))


def _requantized(matrix: Matrix, layout: BlockLayout) -> StoredTensor:
    data, error, total = [], 0.0, 0.0
    for part in _parts(matrix):
        blocks = rounded(part.dense(torch.float32).reshape(-1, layout.size), layout)
        data.append(_rows(layout.pack(blocks), part))
        error, total = _added(error, total, blocks, part)
    return StoredTensor(layout.type, np.concatenate(data), REQUANTIZED, _relative(error, total))


def _plain(matrix: Matrix, wanted: str | None) -> StoredTensor:
    """A weight as 16- or 32-bit floats."""
    dtype = _TORCH[wanted] if wanted else matrix.values.dtype
    if dtype not in _FLOATS:
        dtype = torch.float32
    data, error, total = [], 0.0, 0.0
    for part in _parts(matrix):
        exact = part.dense(torch.float32)
        values = exact.to(dtype)
        data.append(values.contiguous().view(torch.uint8).numpy())
        error += float((values.double() - exact.double()).square().sum())
        total += float(exact.double().square().sum())
    return StoredTensor(_FLOATS[dtype], np.concatenate(data), REQUANTIZED if error else EXACT, _relative(error, total))


def _small_floats(matrix: Matrix) -> StoredTensor | None:
    """NVFP4 and MXFP4, which GGUF stores too; None for other weights."""
    floats = matrix.floats
    if floats is None or floats.codes.dtype != torch.uint8:
        return None
    rows, columns = matrix.shape
    each = floats.by_row()
    codes = torch.stack([each.codes & 15, each.codes >> 4], -1).view(rows, columns)
    scale = each.scale.view(torch.uint8)
    if each.scale.dtype == torch.uint8 and scale.shape[1] * 32 == columns and each.factor is None:
        data = torch.cat([scale.reshape(-1, 1), joined(codes.view(-1, 32), 4, 1, 2, 16)], 1)
        return StoredTensor(GGMLQuantizationType.MXFP4, data.view(rows, -1).numpy(), EXACT, 0.0)
    # GGUF reads seven bits of an 8-bit scale, and its largest value as zero.
    nvfp4 = each.scale.dtype == torch.float8_e4m3fn and scale.shape[1] * 16 == columns and columns % 64 == 0
    if not nvfp4 or int(scale.max()) >= 0x7F:
        return None
    data = torch.cat([scale.reshape(-1, 4), joined(codes.view(-1, 64), 4, 4, 2, 8)], 1)
    return StoredTensor(GGMLQuantizationType.NVFP4, data.view(rows, -1).numpy(), EXACT, 0.0, each.factor)


def together(experts: Sequence[Matrix], wanted: str | None) -> list[StoredTensor]:
    """The same for several experts' weights, which must have one type."""
    each = [stored(matrix, wanted) for matrix in experts]
    kinds = {found.type for found in each}
    if len(kinds) > 1:
        del each
        widest = max(kinds, key=lambda kind: quants.quant_shape_to_byte_shape((1, 256), kind)[1]).name
        name = widest if widest in BY_NAME or widest in _TORCH else "Q8_0"
        each = [stored(matrix, name) for matrix in experts]
    return each


def bytes_of(name: str, elements: int) -> int:
    """How many bytes so many values take in a type."""
    return math.prod(quants.quant_shape_to_byte_shape((elements // 256 + 1, 256), GGMLQuantizationType[name]))


def _fitting(name: str, columns: int) -> str:
    """The type, or the next one whose blocks divide rows of this length."""
    while name not in _TORCH and columns % BY_NAME[name].size:
        name = _NARROWER.get(name, "F16")
    return name


def _bits(matrix: Matrix) -> int:
    """Of a code."""
    if matrix.floats is not None:
        return 4 if matrix.floats.codes.dtype == torch.uint8 else 8
    return matrix.bits


def _parts(matrix: Matrix) -> Iterator[Matrix]:
    """Some rows at a time; codes times scales are not rounded, whatever the scales' dtype."""
    rows = max(1, _AT_ONCE // matrix.shape[1])
    plain = replace(matrix, floats=None, scale=None if matrix.scale is None else matrix.scale.float())
    for start in range(0, matrix.shape[0], rows):
        yield plain.rows(torch.arange(start, min(start + rows, matrix.shape[0])))


def _rows(packed: Tensor, part: Matrix) -> np.ndarray:
    return packed.view(part.shape[0], -1).numpy()


def _added(error: float, total: float, blocks: Blocks, part: Matrix) -> tuple[float, float]:
    exact = part.dense(torch.float32).double()
    difference = blocks.values().view_as(exact).double() - exact
    return error + float(difference.square().sum()), total + float(exact.square().sum())


def _relative(error: float, total: float) -> float:
    return (error / total) ** 0.5 if total else 0.0
