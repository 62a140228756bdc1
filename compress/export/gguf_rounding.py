"""Quantizing weights to GGUF's blocks: a search for the scales of least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from .gguf_layouts import BlockLayout, Blocks

# How far, in codes, a block's largest value may be moved from the outermost code.
_MOVES = [0.1 * step for step in range(-9, 10)]
_REFITS = 2
_TINY = 1e-30


def rounded(values: Tensor, layout: BlockLayout) -> Blocks:
    """Float32 ``[blocks, size]`` as blocks of a layout."""
    if layout.part:
        return _in_parts(values, layout)
    if layout.affine:
        scale, least = _affine(values, layout.high)
        scale, minimum = scale.half(), least.half()
        codes = _codes(values - minimum.float()[:, None], scale.float(), layout)
        return Blocks(codes.short(), scale, minimum)
    scale = _symmetric(values, layout).half()
    return Blocks(_codes(values, scale.float(), layout).short(), scale)


def _in_parts(values: Tensor, layout: BlockLayout) -> Blocks:
    """Fit each part by itself, then quantize part scales by the block's, and refit codes and scales in turn."""
    parts = values.unflatten(1, (-1, layout.part))
    count, each = parts.shape[0], parts.shape[1]
    flat = parts.flatten(0, 1)
    if not layout.affine:
        wanted = _symmetric(flat, layout).view(count, each)
        # The largest part takes the outermost scale; the range has one more below zero.
        scale = _stored((_outermost(wanted) / layout.part_low).squeeze(1))
        part_scale = _shares(wanted, scale, layout.part_low, layout.part_high)
        for _ in range(_REFITS):
            codes = _codes(parts, scale.half().float()[:, None] * part_scale, layout)
            means = part_scale.unsqueeze(-1) * codes
            scale = _ratio((parts * means).sum((1, 2)), means.square().sum((1, 2)))
        scale = scale.half()
        codes = _codes(parts, scale.float()[:, None] * part_scale, layout)
        return Blocks(codes.short().flatten(1), scale, part_scale=part_scale.to(torch.int32))
    wanted, least = (found.view(count, each) for found in _affine(flat, layout.high, below_zero=True))
    scale, minimum = _stored(wanted.amax(1) / layout.part_high), _stored(least.amin(1) / layout.part_high)
    part_scale = _shares(wanted, scale, 0, layout.part_high)
    part_minimum = _shares(least, minimum, 0, layout.part_high)
    for _ in range(_REFITS):
        lowest = minimum.half().float()[:, None] * part_minimum
        codes = _codes(parts - lowest.unsqueeze(-1), scale.half().float()[:, None] * part_scale, layout)
        scale, minimum = _two_factors(parts, part_scale.unsqueeze(-1) * codes, part_minimum.unsqueeze(-1))
    scale, minimum = scale.half(), minimum.half()
    lowest = minimum.float()[:, None] * part_minimum
    codes = _codes(parts - lowest.unsqueeze(-1), scale.float()[:, None] * part_scale, layout)
    return Blocks(codes.short().flatten(1), scale, minimum, part_scale.to(torch.int32), part_minimum.to(torch.int32))


def _stored(scale: Tensor) -> Tensor:
    """A block's scale as it will be read, no smaller than asked for: float16 has few digits of tiny ones, in whose multiples parts' scales are counted."""
    half = scale.half()
    return torch.where(half.float().abs() < scale.abs(), (half.view(torch.int16) + 1).view(torch.float16), half).float()


def _symmetric(values: Tensor, layout: BlockLayout) -> Tensor:
    """The best scale of each row, which maps its largest value to about the outermost code."""
    outermost = _outermost(values)
    best, scale = torch.full_like(outermost, -1.0), torch.zeros_like(outermost)
    for move in _MOVES:
        codes = _rounded(values * _ratio(layout.low + move, outermost), layout.low, layout.high)
        product, square = (values * codes).sum(1, True), codes.square().sum(1, True)
        gain = _ratio(product.square(), square)
        better = gain > best
        best, scale = torch.where(better, gain, best), torch.where(better, _ratio(product, square), scale)
    return scale.squeeze(1)


def _affine(values: Tensor, high: int, *, below_zero: bool = False) -> tuple[Tensor, Tensor]:
    """The best scale and minimum of each row.

    Args:
        below_zero: the minimum must not be above zero.
    """
    low, top = values.amin(1, True), values.amax(1, True)
    if below_zero:
        low = low.clamp_max(0.0)
    best = torch.full_like(low, -1.0)
    scale, least = torch.zeros_like(low), low.clone()
    above, total, size = values - low, values.sum(1, True), values.shape[1]
    for move in _MOVES:
        codes = _rounded(above * _ratio(high + move, top - low), 0, high)
        product, sum_, square = (values * codes).sum(1, True), codes.sum(1, True), codes.square().sum(1, True)
        spread = size * square - sum_.square()
        factor = _ratio(size * product - total * sum_, spread)
        offset = (total - factor * sum_) / size
        if below_zero:
            factor, offset = torch.where(offset > 0, _ratio(product, square), factor), offset.clamp_max(0.0)
        # The reduction of squared error relative to all zeros.
        gain = factor * (2 * product - factor * square - 2 * offset * sum_) + offset * (2 * total - offset * size)
        better = (gain > best) & (factor >= 0)
        best = torch.where(better, gain, best)
        scale, least = torch.where(better, factor, scale), torch.where(better, offset, least)
    return scale.squeeze(1), least.squeeze(1)


def _two_factors(values: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """``a`` and ``b`` for each row, so that ``a * first + b * second`` is closest to ``values [rows, parts, numbers]``."""
    second = second.expand_as(values)
    aa, ab, bb = ((x * y).sum((1, 2)) for x, y in ((first, first), (first, second), (second, second)))
    av, bv = (first * values).sum((1, 2)), (second * values).sum((1, 2))
    determinant = aa * bb - ab * ab
    solvable = determinant > 1e-6 * aa * bb
    # Otherwise the one that explains more, alone; where all of a block's parts begin at zero, it is the first.
    first_alone = av.square() * bb > bv.square() * aa
    first_alone |= bb == 0
    a = torch.where(
        solvable, _ratio(av * bb - bv * ab, determinant), torch.where(first_alone, _ratio(av, aa), torch.zeros_like(av))
    )
    b = torch.where(
        solvable, _ratio(bv * aa - av * ab, determinant), torch.where(first_alone, torch.zeros_like(bv), _ratio(bv, bb))
    )
    return a, b


def _codes(values: Tensor, scale: Tensor, layout: BlockLayout) -> Tensor:
    """The nearest codes."""
    return _rounded(values * _ratio(1.0, scale).unsqueeze(-1), layout.low, layout.high)


def _rounded(values: Tensor, low: int, high: int) -> Tensor:
    return values.round().clamp(low, high)


def _shares(wanted: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return _rounded(wanted * _ratio(1.0, scale)[:, None], low, high)


def _outermost(values: Tensor) -> Tensor:
    """The value of each row with the largest magnitude, ``[rows, 1]``."""
    return values.gather(1, values.abs().argmax(1, True))


def _ratio(above: Tensor | float, below: Tensor) -> Tensor:
    """A quotient, and zero where the divisor is (nearly) zero."""
    nothing = below.abs() < _TINY
    return torch.where(nothing, torch.zeros_like(below), above / torch.where(nothing, torch.ones_like(below), below))
