"""AWQ's clipping: cut off a group's extremes where that lowers the error of its outputs (arXiv:2306.00978, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grid import Grid
from ..layer_stats import LayerStats
from ..scale_search import signed_step
from .options.clip import ClipOptions

_CHUNK = 1 << 18


def clip(weight: Tensor, grid: Grid, stats: LayerStats, options: ClipOptions) -> Grid:
    """Shrink each group's range to the share that changes the group's outputs least on the calibration inputs.

    Only the range of the codes is cut: a rounding that makes up for errors makes up for these, too. Integer formats
    have a range to choose; others keep theirs. Symmetric ones are also tried with scales of the other sign, whose
    largest weight has the one code more.

    Args:
        weight: float32 ``[rows, columns]``.
        grid: the grid of the extremes.
        stats: the layer's inputs; without any, the grid is returned as it is.
        options: see :class:`ClipOptions`.
    """
    if grid.args.type != "int" or stats.tokens == 0:
        return grid
    inputs = stats.rows.float().unflatten(1, (-1, grid.width)).transpose(0, 1)  # [groups, tokens, width]
    energy = inputs.transpose(1, 2) @ inputs
    step = torch.empty_like(grid.step)
    height = max(1, _CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], height):
        part = slice(start, start + height)
        step[part] = _search(weight[part], _rows(grid, part), energy, options)
    # The zero of an asymmetric grid stays: it is the code that stands for 0.
    return Grid.of_scale(grid.args, step.to(grid.scale.dtype), grid.zero, weight.shape, grid.width)


def _search(weight: Tensor, grid: Grid, energy: Tensor, options: ClipOptions) -> Tensor:
    best, best_loss = grid.step, None
    shares = [1 - i * (1 - options.least) / options.steps for i in range(options.steps)]
    full = [grid.step]
    if grid.args.symmetric:
        full.append(signed_step(weight.unflatten(1, (-1, grid.width)), grid.args).squeeze(-1))
    for step in (start * share for start in full for share in shares):
        step = step.to(grid.scale.dtype).float()
        step = torch.where(step != 0, step, grid.step)
        candidate = Grid(grid.args, grid.scale, step, grid.zero, grid.width)
        error = (candidate.round(weight) - weight).unflatten(1, (-1, grid.width)).transpose(0, 1)
        loss = ((error @ energy) * error).sum(-1).T
        if best_loss is None:
            best_loss = loss
            continue
        won = loss < best_loss
        best, best_loss = torch.where(won, step, best), torch.where(won, loss, best_loss)
    return best


def _rows(grid: Grid, part: slice) -> Grid:
    zero = None if grid.zero is None else grid.zero[part]
    return Grid(grid.args, grid.scale[part], grid.step[part], zero, grid.width)
