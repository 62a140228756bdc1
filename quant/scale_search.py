"""Scales that fit a group better than its extremes do, weighing each column by how much it is used."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from .grid import Grid, round_codes

# Shrinking the range clips a few large weights and gains resolution for all others; fewer bits want more of it.
_FACTORS = tuple(1 - 0.05 * i for i in range(13))


def fit_scales(weight: Tensor, args: QuantizationArgs, importance: Tensor) -> Grid:
    """A grid that minimises ``sum_j importance_j (w_j - q_j)^2`` in every group, rounding to nearest.

    Candidates are the extremes' scale, shrunk; the best is refined by one closed-form least-squares
    step if that helps. Symmetric integer formats have such a choice; others keep their extremes.

    Args:
        weight: ``[rows, columns]``, in the dtype that scales are stored in.
        args: the number format.
        importance: ``[columns]``, not negative; the diagonal of the Hessian, for one.
    """
    grid = Grid.fit(weight, args)
    if args.type != "int" or not args.symmetric:
        return grid
    groups = weight.float().view(weight.shape[0], -1, grid.width)
    use = importance.float().view(1, -1, grid.width)
    best = grid.step.unsqueeze(-1)
    best_loss, _ = _loss(groups, best, use, args)
    start = best
    for factor in _FACTORS[1:]:
        best, best_loss = _better(groups, (start * factor).to(weight.dtype).float(), use, args, best, best_loss)
    _, codes = _loss(groups, best, use, args)
    energy = (use * codes.square()).sum(-1, keepdim=True)
    fitted = (use * codes * groups).sum(-1, keepdim=True) / energy.clamp_min(torch.finfo(torch.float32).tiny)
    fitted = torch.where(fitted > 0, fitted, best).to(weight.dtype).float()
    best, _ = _better(groups, fitted, use, args, best, best_loss)
    return Grid.of_scale(args, best.squeeze(-1).to(weight.dtype), None, weight.shape, grid.width)


def _better(
    groups: Tensor, candidate: Tensor, use: Tensor, args: QuantizationArgs, best: Tensor, best_loss: Tensor
) -> tuple[Tensor, Tensor]:
    candidate = torch.where(candidate == 0, best, candidate)
    loss, _ = _loss(groups, candidate, use, args)
    won = loss < best_loss
    return torch.where(won, candidate, best), torch.where(won, loss, best_loss)


def _loss(groups: Tensor, step: Tensor, use: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    codes = round_codes(groups / step, args)
    return (use * (groups - codes * step).square()).sum(-1, keepdim=True), codes
