"""GPTQ: round column by column, correcting the columns still to come (Frantar et al., 2023, arXiv:2210.17323)."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field
from torch import Tensor

from ..grid import Grid, round_to
from ..layer_stats import LayerStats
from ..quantized_weight import QuantizedWeight
from ..scale_search import fit_scales
from .method import RoundingOptions
from .nearest import nearest

_MAX_DAMPING = 1.0
_STRIP = 16


class GptqOptions(RoundingOptions):
    """Options of GPTQ."""

    damping: float = Field(
        default=0.01, gt=0, le=_MAX_DAMPING, description="Share of the Hessian's mean diagonal added to its diagonal."
    )
    activation_order: bool = Field(
        default=True, description="Round the columns with the largest inputs first. Scales stay in the stored order."
    )
    scale_search: bool = Field(
        default=True, description="Shrink a group's range where that lowers its error weighted by input energy."
    )
    block: int = Field(default=256, ge=1, description="Columns between two updates of the whole weight; speed only.")


def gptq(
    weight: Tensor, args: QuantizationArgs, stats: LayerStats, options: GptqOptions | None = None
) -> QuantizedWeight:
    """Round ``weight`` so that the layer's outputs on the calibration inputs change least.

    Scales come from the weight before any correction, so they do not depend on the order of columns.
    If the Hessian is not positive definite, its damping grows tenfold until it is; past a damping of
    1 the weight is rounded to nearest. Both are said in the result's notes.

    Args:
        weight: ``[rows, columns]``, in the dtype that scales are stored in.
        args: the number format.
        stats: the layer's inputs; ``stats.hessian`` is needed.
        options: see :class:`GptqOptions`.
    """
    options = options or GptqOptions()
    if stats.tokens == 0:
        return _nearest_because(weight, args, "no calibration token reached it")
    if stats.hessian is None:
        raise ValueError("gptq needs stats.hessian")
    if not torch.isfinite(stats.hessian.diagonal()).all():
        return _nearest_because(weight, args, "its calibration inputs are not finite")

    diagonal = stats.hessian.diagonal()
    grid = fit_scales(weight, args, diagonal) if options.scale_search else Grid.fit(weight, args)
    columns = weight.shape[1]
    order = torch.arange(columns)
    if options.activation_order:
        order = torch.argsort(stats.hessian.diagonal(), descending=True, stable=True)
    inverse, damping = _inverse_factor(stats.hessian, order, options.damping)
    if inverse is None:
        return _nearest_because(weight, args, f"its Hessian is not positive definite even with damping {damping:g}")
    notes = [] if damping == options.damping else [f"gptq raised its damping from {options.damping:g} to {damping:g}"]

    # Transposed, a column of the weight is contiguous; the loop below touches one at a time.
    remaining = weight.float().T[order].contiguous()
    _round_columns(remaining, inverse, grid, order, options.block)
    values = torch.empty(weight.shape)
    values[:, order] = remaining.T
    return QuantizedWeight(values, grid, notes)


def _round_columns(remaining: Tensor, inverse: Tensor, grid: Grid, order: Tensor, block: int) -> None:
    """Round ``remaining`` (one column of the weight a row) in place."""
    columns = remaining.shape[0]
    step = grid.step.T.contiguous()
    zero = None if grid.zero is None else grid.zero.T.contiguous()
    group = (order // grid.width).tolist()
    pivots = inverse.diagonal().tolist()
    errors = remaining.new_empty(min(block, columns), remaining.shape[1])
    # Three levels: a column corrects its strip, a strip its block, a block all that is left. Each level
    # works on what its cache can hold.
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        for first in range(start, stop, _STRIP):
            last = min(first + _STRIP, stop)
            for i in range(first, last):
                column, where = remaining[i], group[i]
                value = round_to(column, step[where], None if zero is None else zero[where], grid.args)
                error = errors[i - start]
                torch.sub(column, value, out=error).div_(pivots[i])
                remaining[i] = value
                if i + 1 < last:
                    remaining[i + 1 : last].addr_(inverse[i, i + 1 : last], error, alpha=-1)
            if last < stop:
                remaining[last:stop].addmm_(
                    inverse[first:last, last:stop].T, errors[first - start : last - start], alpha=-1
                )
        if stop < columns:
            remaining[stop:].addmm_(inverse[start:stop, stop:].T, errors[: stop - start], alpha=-1)


def _inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """Upper Cholesky factor of the damped Hessian's inverse, and the damping it took."""
    permuted = hessian[order][:, order]
    diagonal = permuted.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean = diagonal.mean().item()
    added = 0.0
    while damping <= _MAX_DAMPING:
        diagonal += damping * mean - added
        added = damping * mean
        factor, failed = torch.linalg.cholesky_ex(permuted)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            del factor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and torch.isfinite(upper.diagonal()).all():
                return upper, damping
        damping *= 10
    return None, damping / 10


def _nearest_because(weight: Tensor, args: QuantizationArgs, reason: str) -> QuantizedWeight:
    result = nearest(weight, args)
    result.notes.append(f"rounded to nearest instead of gptq: {reason}")
    return result
