"""HQQ: scales and zero-points from the weights alone, by half-quadratic splitting (Badri & Shaji, 2023)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ..grid import Grid, round_codes
from ..layer_stats import LayerStats
from ..scale_search import signed_step
from ..stored.quantized_weight import QuantizedWeight
from .nearest import nearest
from .options.hqq import HqqOptions


def hqq(
    weight: Tensor,
    args: QuantizationArgs,
    stats: LayerStats | None = None,
    options: HqqOptions | None = None,
    grid: Grid | None = None,
) -> QuantizedWeight:
    """Fit the grid to the weight under an l_p norm that forgives outliers, then round to nearest.

    Each iteration rounds, splits the error with the generalised soft threshold, and solves for the
    free parameter in closed form. That parameter is the zero-point for an asymmetric format, as
    published, and then the scale, since zero-points are stored as integers; a symmetric format has no zero-point, so there it is the
    scale alone, ``<q, W - e> / <q, q>``, of either sign.
    Formats whose scales are not free real numbers (fp8 blocks, NVFP4, MXFP4) are rounded to nearest.

    Args:
        weight: ``[rows, columns]``; in the dtype that scales are stored in, unless ``grid`` is given.
        args: the number format.
        stats: not used; HQQ needs no calibration data.
        options: see :class:`HqqOptions`.
        grid: the grid to start from instead of the min-max grid.
    """
    options = options or HqqOptions()
    grid = grid or Grid.fit(weight, args)
    if args.type != "int":
        result = nearest(weight, args, grid=grid)
        result.notes.append("rounded to nearest instead of hqq: hqq is defined for integer formats")
        return result
    rows = weight.shape[0]
    groups = weight.float().view(rows, -1, grid.width)
    if args.symmetric:
        scale = _fit_scale(groups, grid.step.unsqueeze(-1), args, options).squeeze(-1).to(grid.scale.dtype)
        fitted = Grid.of_scale(args, scale, None, weight.shape, grid.width)
    else:
        assert grid.zero is not None
        step = grid.step.unsqueeze(-1)
        zero = round_codes(_fit_zero(groups, step, grid.zero.unsqueeze(-1), args, options), args)

        def error_of(candidate: Tensor) -> tuple[Tensor, Tensor]:
            codes = round_codes(groups / candidate + zero, args) - zero
            return codes, groups - codes * candidate

        # A zero-point that is stored as an integer seldom changes; the scale can.
        scale = _descend(step, error_of, groups, options)[0].squeeze(-1).to(grid.scale.dtype)
        fitted = Grid.of_scale(args, scale, zero.squeeze(-1), weight.shape, grid.width)
    return QuantizedWeight(fitted.round(weight.float()), fitted)


def shrink(error: Tensor, beta: float, p: float) -> Tensor:
    """Generalised soft threshold, the minimiser of ``|e|_p + beta/2 (e - error)^2`` used by HQQ."""
    magnitude = error.abs()
    threshold = magnitude.clamp_min(torch.finfo(error.dtype).tiny).pow(p - 1) / beta
    return error.sign() * (magnitude - threshold).clamp_min_(0)


def _fit_scale(groups: Tensor, step: Tensor, args: QuantizationArgs, options: HqqOptions) -> Tensor:
    def error_of(candidate: Tensor) -> tuple[Tensor, Tensor]:
        codes = round_codes(groups / candidate, args)
        return codes, groups - codes * candidate

    best, best_loss = step, error_of(step)[1].abs().pow(options.lp_norm).mean(dim=-1, keepdim=True)
    # The method converges to a step near its start, with the same sign.
    for start in (step, signed_step(groups, args)):
        fitted, loss = _descend(start, error_of, groups, options)
        better = (loss < best_loss) & (fitted != 0)
        best, best_loss = torch.where(better, fitted, best), torch.where(better, loss, best_loss)
    return best


def _descend(
    step: Tensor, error_of: Callable[[Tensor], tuple[Tensor, Tensor]], groups: Tensor, options: HqqOptions
) -> tuple[Tensor, Tensor]:
    """The step that the iterations reach from a start, and its loss."""
    beta = options.beta
    codes, error = error_of(step)
    best, best_loss = step, error.abs().pow(options.lp_norm).mean(dim=-1, keepdim=True)
    for _ in range(options.iterations):
        explained = groups - shrink(error, beta, options.lp_norm)
        energy = codes.square().sum(dim=-1, keepdim=True)
        fitted = (codes * explained).sum(dim=-1, keepdim=True) / energy.clamp_min(1)
        step = torch.where(fitted * step > 0, fitted, step)
        codes, error = error_of(step)
        loss = error.abs().pow(options.lp_norm).mean(dim=-1, keepdim=True)
        better = loss < best_loss
        best, best_loss = torch.where(better, step, best), torch.where(better, loss, best_loss)
        if not better.any():
            break
        beta *= options.kappa
    return best, best_loss


def _fit_zero(groups: Tensor, step: Tensor, zero: Tensor, args: QuantizationArgs, options: HqqOptions) -> Tensor:
    beta = options.beta
    best = zero
    best_loss: Tensor | None = None
    for _ in range(options.iterations):
        codes = round_codes(groups / step + zero, args)
        error = groups - (codes - zero) * step
        loss = error.abs().mean()
        if best_loss is not None and loss >= best_loss:
            break
        best, best_loss = zero, loss
        explained = groups - shrink(error, beta, options.lp_norm)
        zero = (codes - explained / step).mean(dim=-1, keepdim=True)
        beta *= options.kappa
    return best
