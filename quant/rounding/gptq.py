"""GPTQ: round column by column, and correct the remaining columns (Frantar et al., 2023, arXiv:2210.17323)."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ..grid import Grid, round_to
from ..layer_stats import LayerStats
from ..pattern import Pattern
from ..scale_search import fit_scales
from ..sparsity import keep_share
from ..stored.quantized_weight import QuantizedWeight
from ..zeros import not_pruned
from .columns import Final, by_now, column_factor, settle_block, settle_columns
from .descent import descend
from .nearest import nearest
from .options.gptq import AT_A_TIME, MAX_DAMPING, GptqOptions
from .removal import Removal

# What later columns compensate costs less than what is clipped, which all would have to make up for. GPTQModel offers
# the same exponent.
_POWER = 2.4


def gptq(
    weight: Tensor,
    args: QuantizationArgs,
    stats: LayerStats,
    options: GptqOptions | None = None,
    grid: Grid | None = None,
) -> QuantizedWeight:
    """Round ``weight`` so that the layer's outputs on the calibration inputs change least.

    Scales come from the whole weight before any column is rounded, so they do not depend on the order of columns.
    If the Hessian is not positive definite, its damping grows tenfold until it is; past a damping of
    1 the weight is rounded to nearest. Both are recorded in the result's notes.

    Args:
        weight: ``[rows, columns]``; in the dtype that scales are stored in, unless ``grid`` is given.
        args: the number format.
        stats: the layer's inputs; ``stats.hessian`` is needed.
        options: see :class:`GptqOptions`.
        grid: the grid to start from instead of the min-max grid.
    """
    options = options or GptqOptions()
    grid = grid or Grid.fit(weight, args)
    if stats.tokens == 0:
        return _nearest_because("no calibration token reached it", weight, grid, options.removes)
    if stats.hessian is None:
        raise ValueError("gptq needs stats.hessian")
    if not torch.isfinite(stats.hessian.diagonal()).all():
        return _nearest_because("its calibration inputs are not finite", weight, grid, options.removes)

    diagonal = stats.hessian.diagonal()
    refit = options.refit_groups and args.strategy == "group"
    by_size = options.activation_order and options.removes is None
    backwards = _order(diagonal, grid.width if refit else None, by_size=by_size).flip(0)
    factor, damping = column_factor(stats.hessian, backwards, options.damping, MAX_DAMPING)
    if factor is None:
        why = f"its Hessian is not positive definite even with damping {damping:g}"
        return _nearest_because(why, weight, grid, options.removes)
    notes = [] if damping == options.damping else [f"gptq raised its damping from {options.damping:g} to {damping:g}"]

    # Transposed, a column of the weight is contiguous; the loop below touches one at a time.
    columns = weight.T.contiguous()[backwards].float()
    stays = not_pruned(weight)
    stays = None if stays is None else stays.T[backwards]
    shift = stats.shift if options.error_aware else None
    if shift is not None:
        columns += options.error_aware * _makes_up(columns, shift, backwards, factor)
        weight = columns[torch.argsort(backwards)].T.contiguous()
    removes = options.removes
    removal = None if removes is None else _removal(removes, factor, diagonal, backwards, weight.shape[0])
    factor /= factor.diagonal().clone()[:, None]
    if refit:
        importance = diagonal if options.scale_search else None
        rounded, grid = _round_groups(columns, factor, grid, backwards, importance, stays)
    else:
        if options.scale_search:
            likely = weight if removal is None else weight * removal.likely(columns).T[:, torch.argsort(backwards)]
            grid = fit_scales(likely, grid, diagonal, _POWER)
        final = _rounding(grid, backwards // grid.width, stays)
        rounded = _round_columns(columns, factor, final, removal, options.block)
    del factor
    order = torch.argsort(backwards)
    values = rounded[order].T.contiguous()
    if options.sweeps:
        grid = descend(
            values, columns[order].T, grid, stats.hessian, damping, options.sweeps, _kept(stays, removal, order)
        )
    return QuantizedWeight(values, grid, notes)


def _removal(removes: Pattern | float, factor: Tensor, diagonal: Tensor, backwards: Tensor, rows: int) -> Removal:
    """Which weights are removed while columns are rounded, by their cost."""
    cost = factor.diagonal().square().clone()
    cost[(diagonal == 0)[backwards]] = 0.0  # columns whose inputs are all zero go first
    return Removal(removes, cost, backwards, rows)


def _kept(stays: Tensor | None, removal: Removal | None, order: Tensor) -> Tensor | None:
    """Which weights may differ from 0, ``[rows, columns]`` in the weight's own order; None for all."""
    masks = [mask for mask in (stays, None if removal is None else removal.stays) if mask is not None]
    return torch.stack(masks).all(0)[order].T if masks else None


def _round_columns(columns: Tensor, factor: Tensor, final: Final, removal: Removal | None, block: int) -> Tensor:
    """Round one column after another; the remaining columns compensate for each."""
    if removal is None:
        return settle_columns(columns, factor, final, block)
    left = removal.stays
    return settle_columns(
        columns,
        factor,
        lambda column, wanted: final(column, wanted) * left[column],
        AT_A_TIME,
        removal.coming,
        removal.together,
    )


def _makes_up(columns: Tensor, shift: Tensor, backwards: Tensor, factor: Tensor) -> Tensor:
    """What to add to a weight so that its outputs for ``x`` come closest to its outputs for the unrounded ``f``.

    That is GPTAQ's objective (Li et al., 2025, arXiv:2504.02692), ``min |W F - Q X|^2``. Its minimum over all real Q is
    ``W + W (F - X) X^T H^-1``, and the rest of the objective is ``|(Q - that) X|^2``, which is GPTQ's. So one
    solve with the existing factor is enough, and the columns are rounded as usual. The paper corrects only the
    remaining columns; that gained less at 2 and 3 bits.
    """
    wanted = shift[backwards[:, None], backwards].T @ columns  # the solver copies its matrix; this one is freed by then
    return torch.cholesky_solve(wanted, factor, upper=True)


def _order(diagonal: Tensor, width: int | None, *, by_size: bool) -> Tensor:
    """The order in which columns are rounded; with ``width``, group by group."""
    if not by_size:
        return torch.arange(len(diagonal))
    if width is None:
        return torch.argsort(diagonal, descending=True, stable=True)
    groups = diagonal.view(-1, width)
    inside = torch.argsort(groups, descending=True, stable=True) + torch.arange(0, len(diagonal), width)[:, None]
    return inside[torch.argsort(groups.sum(1), descending=True, stable=True)].flatten()


def _rounding(grid: Grid, groups: Tensor, stays: Tensor | None, start: int = 0) -> Final:
    """The final values of columns from ``start`` on, given the group of each, and which of the whole weight stay."""
    step = grid.step.T.contiguous()
    zero = None if grid.zero is None else grid.zero.T.contiguous()
    group = groups.tolist()

    def final(column: int, wanted: Tensor) -> Tensor:
        where = group[column - start]
        rounded = round_to(wanted, step[where], None if zero is None else zero[where], grid.args)
        return rounded if stays is None else rounded * stays[column]

    return final


def _round_groups(
    columns: Tensor, feedback: Tensor, grid: Grid, backwards: Tensor, importance: Tensor | None, stays: Tensor | None
) -> tuple[Tensor, Grid]:
    """Round columns with scales computed for each group after the errors of earlier groups are compensated."""
    width = grid.width
    rounded = torch.empty_like(columns)
    fitted: dict[int, Grid] = {}
    for stop in range(columns.shape[0], 0, -width):
        part = slice(stop - width, stop)
        passed_on = feedback[part, stop:] @ columns[stop:]
        moved = by_now(columns[part], passed_on, feedback[part, part]).T.contiguous()
        own = Grid.fit(moved, grid.args, grid.scale.dtype)
        if importance is not None:
            own = fit_scales(moved, own, importance[backwards[part]], _POWER)
        wanted = columns[part] + passed_on
        final = _rounding(own, torch.zeros(width, dtype=torch.long), stays, part.start)
        rounded[part] = settle_block(columns, wanted, feedback, final, part)
        fitted[int(backwards[part][0]) // width] = own
    grids = [fitted[group] for group in sorted(fitted)]
    zeros = [own.zero for own in grids if own.zero is not None]
    shape = torch.Size((columns.shape[1], columns.shape[0]))
    scale = torch.cat([own.scale for own in grids], 1)
    return rounded, Grid.of_scale(grid.args, scale, torch.cat(zeros, 1) if zeros else None, shape, width)


def _nearest_because(reason: str, weight: Tensor, grid: Grid, removes: Pattern | float | None) -> QuantizedWeight:
    """Round to nearest, with the smallest weights zeroed if some are to be removed."""
    if removes is not None:
        sizes = weight.float().abs()
        keep = removes.keep(sizes) if isinstance(removes, Pattern) else keep_share(sizes, removes, by_row=False)
        weight = weight * keep
    result = nearest(weight, grid.args, grid=grid)
    result.notes.append(f"rounded to nearest instead of gptq: {reason}")
    return result
