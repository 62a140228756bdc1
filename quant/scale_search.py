"""Scales that fit a group better than its extremes do, weighing each column by how much it is used."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from .grid import Grid, round_codes

# Shrinking the range clips a few large weights and gains resolution for all others; fewer bits want more of it.
_FACTORS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4)
# Rows are searched in chunks that stay in the processor's cache; smaller ones cost more in calls than they gain.
_CHUNK = 1 << 19


def fit_scales(weight: Tensor, grid: Grid, importance: Tensor, power: float = 2.0) -> Grid:
    """A grid that lowers ``sum_j importance_j |w_j - q_j|^power`` in every group, rounding to nearest.

    Candidates are the given scale, shrunk, and scales that give the group's largest weight the one
    code more that two's complement has on its negative side; such a scale is negative where that weight
    is positive. The best is refined by one closed-form least-squares step if that helps. Symmetric integer formats have such a choice; others keep their grid.

    Args:
        weight: ``[rows, columns]``.
        grid: where to start from: that of the extremes.
        importance: ``[columns]``, not negative; the diagonal of the Hessian, for one.
        power: the larger, the less do large weights lose for many small ones.
    """
    args, stored = grid.args, grid.scale.dtype
    if args.type != "int" or not args.symmetric:
        return grid
    rows, columns = weight.shape
    use = importance.float().contiguous().view(1, -1, grid.width)
    scale = torch.empty_like(grid.step)
    height = max(1, _CHUNK // columns)
    for start in range(0, rows, height):
        part = slice(start, start + height)
        groups = weight[part].float().view(-1, columns // grid.width, grid.width)
        scale[part] = _search(groups, grid.step[part].unsqueeze(-1), use, args, stored, power).squeeze(-1)
    return Grid.of_scale(args, scale.to(stored), None, weight.shape, grid.width)


def _search(
    groups: Tensor, start: Tensor, use: Tensor, args: QuantizationArgs, stored: torch.dtype, power: float
) -> Tensor:
    best, best_loss = start, _loss(groups, start, use, args, power)
    for full in (start, signed_step(groups, args)):
        for factor in (1.0, *_FACTORS):
            candidate = _as_stored(full * factor, best, stored)
            loss = _loss(groups, candidate, use, args, power)
            won = loss < best_loss
            best, best_loss = torch.where(won, candidate, best), torch.where(won, loss, best_loss)
    codes = round_codes(groups / best, args)
    weighted = use * codes
    energy = (weighted * codes).sum(-1, keepdim=True)
    fitted = (weighted * groups).sum(-1, keepdim=True) / energy.clamp_min_(torch.finfo(torch.float32).tiny)
    fitted = _as_stored(fitted, best, stored)
    loss = _loss(groups, fitted, use, args, power)
    return torch.where(loss < best_loss, fitted, best)


def signed_step(groups: Tensor, args: QuantizationArgs) -> Tensor:
    """The step that gives each group's largest weight the lowest code, of which two's complement has one more than above 0.

    Args:
        groups: float32 ``[..., width]``.
        args: a symmetric integer format.

    Returns:
        ``[..., 1]``: negative where the largest weight is positive.
    """
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -(2 ** (args.num_bits - 1))


def _as_stored(scale: Tensor, otherwise: Tensor, stored: torch.dtype) -> Tensor:
    rounded = scale.to(stored).float()
    return torch.where(rounded != 0, rounded, otherwise)


def _loss(groups: Tensor, step: Tensor, use: Tensor, args: QuantizationArgs, power: float) -> Tensor:
    codes = round_codes(groups / step, args)
    errors = torch.addcmul(groups, codes, step, value=-1)
    errors = errors.square_() if power == 2 else errors.abs_().pow_(power)
    return errors.mul_(use).sum(-1, keepdim=True)
