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
    scale_search: bool | None = Field(
        default=None,
        description="Shrink a group's range where that lowers its error weighted by input energy. By default for 3 bits"
        " and less, and for 4 bits in groups of more than 64.",
    )
    block: int = Field(default=256, ge=1, description="Columns between two updates of the whole weight; speed only.")


def gptq(
    weight: Tensor,
    args: QuantizationArgs,
    stats: LayerStats,
    options: GptqOptions | None = None,
    grid: Grid | None = None,
) -> QuantizedWeight:
    """Round ``weight`` so that the layer's outputs on the calibration inputs change least.

    Scales come from the weight before any correction, so they do not depend on the order of columns.
    If the Hessian is not positive definite, its damping grows tenfold until it is; past a damping of
    1 the weight is rounded to nearest. Both are said in the result's notes.

    Args:
        weight: ``[rows, columns]``; in the dtype that scales are stored in, unless ``grid`` is given.
        args: the number format.
        stats: the layer's inputs; ``stats.hessian`` is needed.
        options: see :class:`GptqOptions`.
        grid: the grid to start from instead of the extremes'.
    """
    options = options or GptqOptions()
    grid = grid or Grid.fit(weight, args)
    if stats.tokens == 0:
        return _nearest_because(weight, grid, "no calibration token reached it")
    if stats.hessian is None:
        raise ValueError("gptq needs stats.hessian")
    if not torch.isfinite(stats.hessian.diagonal()).all():
        return _nearest_because(weight, grid, "its calibration inputs are not finite")

    diagonal = stats.hessian.diagonal()
    search = options.scale_search
    # Where it lowered perplexity on real text (benchmarks/rounding_quality.py): extremes cost most there.
    if args.num_bits < 4 or (args.num_bits == 4 and grid.width > 64) if search is None else search:
        grid = fit_scales(weight, grid, diagonal)
    order = torch.arange(weight.shape[1])
    if options.activation_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    backwards = order.flip(0)
    feedback, damping = _feedback(stats.hessian, backwards, options.damping)
    if feedback is None:
        return _nearest_because(weight, grid, f"its Hessian is not positive definite even with damping {damping:g}")
    notes = [] if damping == options.damping else [f"gptq raised its damping from {options.damping:g} to {damping:g}"]

    # Transposed, a column of the weight is contiguous; the loop below touches one at a time.
    columns = weight.T.contiguous()[backwards].float()
    rounded = _round_columns(columns, feedback, grid, backwards, options.block)
    return QuantizedWeight(rounded[torch.argsort(backwards)].T.contiguous(), grid, notes)


def _feedback(hessian: Tensor, backwards: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """What each column takes over of the errors of those rounded before it, and the damping that was used.

    The paper reads it off the inverse Hessian's Cholesky factor. The same numbers stand in the unit
    triangular ``U`` of ``H = U D U^T``, which needs no inverse (Chee et al., 2023, arXiv:2307.13304,
    theorem 6): a quarter of the operations, and better conditioned. With the column that is rounded
    first coming last, that is an ordinary Cholesky factorization.
    """
    permuted = hessian[backwards[:, None], backwards]
    diagonal = permuted.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean = diagonal.mean().item()
    added = 0.0
    while damping <= _MAX_DAMPING:
        diagonal += damping * mean - added
        added = damping * mean
        factor, failed = torch.linalg.cholesky_ex(permuted, upper=True)
        if not failed and torch.isfinite(factor.diagonal()).all():
            factor /= factor.diagonal().clone()[:, None]
            return factor, damping
        damping *= 10
    return None, damping / 10


def _round_columns(columns: Tensor, feedback: Tensor, grid: Grid, backwards: Tensor, block: int) -> Tensor:
    """Round ``columns`` (one column of the weight a row) from the last to the first.

    They are replaced by their rounding errors.
    """
    step = grid.step.T.contiguous()
    zero = None if grid.zero is None else grid.zero.T.contiguous()
    group = (backwards // grid.width).tolist()
    rounded = torch.empty_like(columns)
    # Three levels: all errors so far correct a block, a strip the rest of its block, a column the rest
    # of its strip. Each level works on what its cache can hold.
    for stop in range(columns.shape[0], 0, -block):
        start = max(0, stop - block)
        wanted = torch.addmm(columns[start:stop], feedback[start:stop, stop:], columns[stop:])
        for last in range(stop, start, -_STRIP):
            first = max(start, last - _STRIP)
            for i in reversed(range(first, last)):
                where = group[i]
                rounded[i] = round_to(wanted[i - start], step[where], None if zero is None else zero[where], grid.args)
                error = columns[i].sub_(rounded[i])
                if i > first:
                    wanted[first - start : i - start].addr_(feedback[first:i, i], error)
            if first > start:
                wanted[: first - start].addmm_(feedback[start:first, first:last], columns[first:last])
    return rounded


def _nearest_because(weight: Tensor, grid: Grid, reason: str) -> QuantizedWeight:
    result = nearest(weight, grid.args, grid=grid)
    result.notes.append(f"rounded to nearest instead of gptq: {reason}")
    return result
