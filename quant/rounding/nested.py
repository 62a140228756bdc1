"""Codes of 8 bits whose upper four are a good model themselves: rounded for both."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ..grid import Grid
from ..layer_stats import LayerStats
from ..stored.quantized_weight import QuantizedWeight
from ..zeros import not_pruned
from .columns import Final, column_factor, settle_columns
from .descent import descend_codes, normalized
from .nearest import nearest
from .options.gptq import MAX_DAMPING
from .options.nested import NestedOptions

_LOWER = 16  # codes that share their upper four bits


def nested(
    weight: Tensor,
    args: QuantizationArgs,
    stats: LayerStats | None = None,
    options: NestedOptions | None = None,
    grid: Grid | None = None,
) -> QuantizedWeight:
    """Round a weight to 8 bits so that their upper four, read alone, change the layer's outputs little, too.

    Read alone they stand for the middle of the sixteen codes that share them. They are chosen by GPTQ, among those from which the
    lower four bits reach the original weight within ``give`` steps of 4 bits. Then GPTQ chooses the lower four,
    which also make up for what the upper ones leave. Each ends with sweeps of coordinate descent, as GPTQ does. Zeros of a pruned weight
    stay zero.

    Args:
        weight: ``[rows, columns]``; in the dtype that scales are stored in, unless ``grid`` is given.
        args: the number format: symmetric codes of 8 bits.
        stats: the layer's inputs; without them both are rounded to nearest.
        options: see :class:`NestedOptions`.
        grid: the grid to start from instead of the min-max grid.

    Raises:
        ValueError: the format is another one.
    """
    if args.type != "int" or args.num_bits != 8 or not args.symmetric:
        raise ValueError("nested rounding is for symmetric codes of 8 bits; use scheme W4in8 or W8A16")
    options = options or NestedOptions()
    grid = grid or Grid.fit(weight, args)
    if stats is None or stats.tokens == 0 or stats.hessian is None:
        return _nearest_because("no calibration token reached it", weight, args, grid)
    if not torch.isfinite(stats.hessian.diagonal()).all():
        return _nearest_because("its calibration inputs are not finite", weight, args, grid)
    backwards = torch.argsort(stats.hessian.diagonal(), descending=True, stable=True).flip(0)
    factor, damping = column_factor(stats.hessian, backwards, options.damping, MAX_DAMPING)
    if factor is None:
        why = f"its Hessian is not positive definite even with damping {damping:g}"
        return _nearest_because(why, weight, args, grid)
    notes = [] if damping == options.damping else [f"nested raised its damping from {options.damping:g} to {damping:g}"]
    factor /= factor.diagonal().clone()[:, None]

    columns = weight.T.contiguous()[backwards].float()
    step = grid.step.T[backwards // grid.width]
    # Of 8 bits' steps, which may be negative.
    original = columns / step
    lowest = ((original - options.give * _LOWER) / _LOWER).floor().clamp_(-8, 7)
    highest = ((original + options.give * _LOWER) / _LOWER).floor().clamp_(-8, 7)
    upper = torch.empty_like(columns)
    stays = not_pruned(weight)
    pruned = None if stays is None else ~stays.T[backwards]
    if pruned is not None:
        # No upper four bits stand for zero; code 0 is the first of those whose upper four bits are 0.
        lowest[pruned] = highest[pruned] = 0

    def choose_upper(column: int, wanted: Tensor) -> Tensor:
        found = (wanted / step[column] / _LOWER).floor()
        found = torch.minimum(torch.maximum(found, lowest[column]), highest[column])
        upper[column] = found
        return (found + 0.5) * _LOWER * step[column]

    def choose_lower(column: int, wanted: Tensor) -> Tensor:
        first = upper[column] * _LOWER
        found = (wanted / step[column]).round()
        found = torch.minimum(torch.maximum(found, first), first + _LOWER - 1)
        return (found if pruned is None else found.masked_fill(pruned[column], 0)) * step[column]

    feedback = normalized(stats.hessian[backwards[:, None], backwards], damping)[0] if options.sweeps else None

    def settled(final: Final) -> Tensor:
        errors = columns.clone()
        values = settle_columns(errors, factor, final, options.block)
        if feedback is not None:
            descend_codes(values, errors, feedback, final, options.sweeps)
        return values

    settled(choose_upper)
    rounded = settled(choose_lower)
    return QuantizedWeight(rounded[torch.argsort(backwards)].T.contiguous(), grid, notes)


def _nearest_because(reason: str, weight: Tensor, args: QuantizationArgs, grid: Grid) -> QuantizedWeight:
    result = nearest(weight, args, grid=grid)
    result.notes.append(f"rounded to nearest instead of nested: {reason}")
    return result
