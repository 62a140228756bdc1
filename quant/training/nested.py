"""QAT of nested codes: the upper four of 8 bits are trained, within what the lower four can make up for.

The upper bits alone are what drafts (:mod:`smelt.quant.rounding.nested`); all bits stay those of the original weight. So the latent weight is kept where
the lower bits still reach the original, the scales, which both share, are not trained, and the lower bits are chosen last.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from ..grid import Grid
from ..stored.quantized_weight import QuantizedWeight
from .qat import QatLinear, latent_start

_LOWER = 16  # codes that share their upper four bits


class NestedQatLinear(QatLinear):
    """A linear that computes with the upper four of its weight's 8 bits while these are trained.

    Args:
        original: the weight that all bits stand for, ``[rows, columns]``.
        rounded: its 8-bit form so far, whose upper bits training starts from.
        grid: its scales.
        give: how far a weight of 8 bits may be from the original for the sake of the upper bits, in steps of 4 bits.
        dtype: the compute dtype.
        bias: of the linear.
        rank: train a low-rank update of this rank instead of the weight.
        stays: which weights may be nonzero, if it was pruned; used with a rank only.
    """

    def __init__(
        self,
        original: Tensor,
        rounded: Tensor,
        grid: Grid,
        give: float,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        rank: int | None = None,
        stays: Tensor | None = None,
    ) -> None:
        upper = upper_grid(grid)
        latent = latent_start(original, upper_bits(rounded, grid), upper)
        # Nothing restores the upper bits to the checkpoint's dtype before it multiplies by them.
        super().__init__(latent, upper, torch.float32, dtype, bias, learn_scales=False, rank=rank, stays=stays)
        self._all_bits, self._give = grid, give
        # A parameter, so that several processes share it.
        self.original = nn.Parameter(original.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def rounded(self) -> QuantizedWeight:
        """The current codes of 8 bits: the trained upper ones, and of those that share them the nearest to the original."""
        step = _flat_step(self._all_bits, self.original)
        first = (self.grid.round(self._whole()) / step - _LOWER / 2).round()
        codes = (self.original.float() / step).round()
        codes = torch.minimum(torch.maximum(codes, first), first + _LOWER - 1)
        return QuantizedWeight(codes * step, self._all_bits)

    def _whole(self) -> Tensor:
        reach = self._give * _LOWER * _flat_step(self._all_bits, self.original).abs()
        original = self.original.float()
        return _Within.apply(super()._whole(), original - reach, original + reach)


class _Within(torch.autograd.Function):
    """Clamping that lets gradients through, or a weight at its limit would stay there for good.

    All of them: those of several processes or passes are added up later, and only their sum says which way leads back.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, least: Tensor, most: Tensor) -> Tensor:  # type: ignore[override]
        return torch.minimum(torch.maximum(weight, least), most)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return slope, None, None


def upper_grid(grid: Grid) -> Grid:
    """The grid of the upper four of 8 bits: sixteen steps apart, at the middle of the codes that share them."""
    args = QuantizationArgs.model_validate(
        grid.args.model_dump() | {"num_bits": 4, "symmetric": False, "zp_dtype": torch.int8}
    )
    scale = grid.scale * _LOWER
    middle = torch.full_like(grid.step, -0.5)
    return Grid.of_scale(args, scale, middle, torch.Size((len(grid.step), 0)), grid.width)


def upper_bits(rounded: Tensor, grid: Grid) -> Tensor:
    """What the upper four bits of a weight on a grid of 8 stand for."""
    # From within a code's cell, whose edge may be between two upper ones.
    return upper_grid(grid).round(rounded + _flat_step(grid, rounded) / 2)


def _flat_step(grid: Grid, like: Tensor) -> Tensor:
    return grid.step.repeat_interleave(grid.width, dim=1)[:, : like.shape[1]]
