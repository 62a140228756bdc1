"""QAT linears: they compute with a rounded weight while the latent weight and the scales are trained.

Gradients pass the rounding straight through where a weight is within its range (STE, arXiv:1308.3432); scales are learned
as in LSQ (arXiv:1902.08153), as a factor of their initial values, so that one learning rate suits them all.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor, nn
from torch.nn import functional

from ..grid import Grid, largest_code, round_codes, spacing
from ..scheme import Scheme
from ..stored.compressed_tensors import restore
from ..stored.quantized_weight import QuantizedWeight

# How close to the edge of its code's cell a weight may start, in steps: farther than a step of training moves it, or the first one would undo what
# GPTQ chose (held-out KL of smelt-6m in W4A16 0.005 -> 0.21 after one step from 0.001; 0.25 learns as from 0.1; by hand).
_MARGIN = 0.1
# Limits of a scale's factor.
_LEAST_FACTOR = 0.05
# From a power of two to the codes below it.
_BELOW = 1 - 2.0**-8


class QatLinear(nn.Module):
    """A linear whose weight is rounded on each use, as a checkpoint would store and restore it.

    Args:
        latent: the weight before rounding, ``[rows, columns]``; it is trained in float32.
        grid: the initial scales.
        stored: the dtype in which the checkpoint stores the weight's scales, and transformers restores the weight.
        dtype: the compute dtype.
        bias: of the linear.
        learn_scales: whether scales are trained, if the format allows it.
        rank: train a low-rank update of this rank instead of the weight.
        stays: which weights may be nonzero, if it was pruned; used with a rank only.

    Attributes:
        latent: the weight before rounding; frozen if there is a rank.
        clip: the factors of the scales; None if they are not trained.
        down, up: the update ``up @ down`` of the latent weight; None without a rank.
    """

    def __init__(
        self,
        latent: Tensor,
        grid: Grid,
        stored: torch.dtype,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        learn_scales: bool = True,
        rank: int | None = None,
        stays: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.grid, self._stored, self._dtype = grid, stored, dtype
        self.latent = nn.Parameter(latent.detach().float().contiguous(), requires_grad=rank is None)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        free = learn_scales and grid.args.scale_dtype is None
        self.clip = nn.Parameter(torch.ones_like(grid.scale, dtype=torch.float32)) if free else None
        self.down = self.up = None
        self._stays = stays
        if rank is not None:
            rank = min(rank, *latent.shape)
            start = torch.randn(rank, latent.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
            self.down = nn.Parameter((start / latent.shape[1] ** 0.5).to(latent.device))
            self.up = nn.Parameter(torch.zeros(latent.shape[0], rank, device=latent.device))

    @property
    def weight(self) -> Tensor:
        """The weight as restored from the checkpoint, in the compute dtype."""
        # In one function, so that no gradient passes through the stored dtype: float16 has none below 6e-8.
        return _Rounded.apply(self._whole(), self._scale(), self.grid, self._stored).to(self._dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """The quantized linear's outputs."""
        return functional.linear(inputs, self.weight, self.bias)

    @torch.no_grad()
    def rounded(self) -> QuantizedWeight:
        """The current codes and scales."""
        grid = _with_scale(self.grid, self._scale())
        return QuantizedWeight(grid.round(self._whole()), grid)

    def _whole(self) -> Tensor:
        if self.up is None or self.down is None:
            return self.latent
        beside = self.up @ self.down
        return self.latent + (beside if self._stays is None else beside * self._stays)

    def _scale(self) -> Tensor:
        """Scales as stored, widened; gradients pass straight through their rounding."""
        scale = self.grid.scale
        if self.clip is None:
            return scale.float()
        exact = scale.float() * self.clip.clamp_min(_LEAST_FACTOR)
        stored = exact.to(scale.dtype)
        stored = torch.where(stored == 0, torch.finfo(scale.dtype).tiny, stored)
        return exact + (stored.float() - exact).detach()


class _Rounded(torch.autograd.Function):
    """Rounding onto a grid; only the weight and the scales are kept for the backward pass, which rounds again."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, grid: Grid, stored: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight, scale)
        ctx.grid = grid
        codes, _ = _codes(weight, _with_scale(grid, scale))
        step, zero = _spread(_with_scale(grid, scale))
        return _flat((codes if zero is None else codes - zero) * step, weight).to(stored).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        weight, scale = ctx.saved_tensors
        grid = _with_scale(ctx.grid, scale)
        codes, place = _codes(weight, grid)
        zero = _spread(grid)[1]
        slope = _grouped(slope.to(weight.dtype), grid)
        inside = _inside(place, grid)
        into = _flat(slope * inside, weight)
        if not ctx.needs_input_grad[1]:
            return into, None, None, None
        # codes - zero times the step, of which the codes fall as the step grows.
        by_step = codes - torch.where(inside, place, 0.0)
        if zero is not None:
            by_step = by_step - torch.where(inside, 0.0, zero)
        return into, _by_scale((by_step * slope).sum(-1), grid, scale), None, None


def stored_grid(stored: dict[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Grid:
    """The grid of a weight stored by compressed-tensors.

    Args:
        stored: its tensors, by local name.
        scheme: how they are to be read.
        shape: the weight's rows and columns.
    """
    args, scale, zero = scheme.args, _widened(stored["weight_scale"]), None
    if not args.symmetric:
        zero = stored["weight_zero_point"]
        if zero.dtype == torch.int32:  # packed along the rows
            zero = unpack_from_int32(zero, args.num_bits, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
    width = shape[1]
    if args.strategy in ("group", "tensor_group"):
        width = args.group_size or shape[1]
    elif args.strategy == "block":
        assert args.block_structure is not None
        width = args.block_structure[1]
    return Grid.of_scale(args, scale, zero, torch.Size(shape), width, stored.get("weight_global_scale"))


def _widened(scale: Tensor) -> Tensor:
    """8-bit scales as the values that they represent."""
    if scale.dtype == torch.uint8:  # powers of two, with the bias of a float32's exponent
        return torch.exp2(scale.float() - 127)
    return scale.float() if scale.itemsize == 1 else scale


def stored_values(stored: dict[str, Tensor], scheme: Scheme, grid: Grid) -> Tensor:
    """A stored weight's values in float32; transformers restores them in fewer bits.

    Args:
        stored: its tensors, by local name.
        scheme: how they are to be read.
        grid: their grid.
    """
    return grid.round(restore(stored, scheme).float())


def latent_start(original: Tensor | None, rounded: Tensor, grid: Grid) -> Tensor:
    """The initial latent weight: the one nearest the original that rounds to the same codes.

    Starting in the middle of a cell, a weight would have to move half a step before its code changes.

    Args:
        original: the weight before it was rounded; None if unknown.
        rounded: its values on the grid.
        grid: the grid.
    """
    if original is None:
        return rounded
    below, above = (_flat(each * grid.step.abs().unsqueeze(-1), rounded) for each in _cells(rounded, grid))
    return torch.minimum(torch.maximum(original.float(), rounded - below), rounded + above)


def _cells(rounded: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """How far weights may start below and above their codes, in steps, ``[rows, groups, width]``."""
    codes, _ = _codes(rounded, grid)
    reach = torch.full_like(codes, 0.5 - _MARGIN)
    if grid.args.type == "int":
        return reach, reach
    # Codes lie twice as close below a power of two as above it.
    outwards, inwards = (reach * spacing(each, grid.args) for each in (codes, codes * _BELOW))
    return torch.where(codes > 0, inwards, outwards), torch.where(codes < 0, inwards, outwards)


def _with_scale(grid: Grid, scale: Tensor) -> Grid:
    """The same grid with other scales, stored in its dtype."""
    stored, shape = scale.detach().to(grid.scale.dtype), torch.Size((len(grid.step), 0))
    return Grid.of_scale(grid.args, stored, grid.zero, shape, grid.width, grid.global_scale)


def _spread(grid: Grid) -> tuple[Tensor, Tensor | None]:
    return grid.step.unsqueeze(-1), None if grid.zero is None else grid.zero.unsqueeze(-1)


def _codes(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes ``[rows, groups, width]``, and their unrounded values."""
    step, zero = _spread(grid)
    place = _grouped(weight, grid) / step
    if zero is not None:
        place = place + zero
    return round_codes(place, grid.args), place


def _inside(place: Tensor, grid: Grid) -> Tensor:
    """A mask of the weights within their range."""
    most = largest_code(grid.args)
    return (place >= -most - (grid.args.type == "int")) & (place <= most)


def _by_scale(slopes: Tensor, grid: Grid, scale: Tensor) -> Tensor:
    """Sum over the rows that share a scale."""
    if grid.global_scale is not None:
        slopes = slopes / grid.global_scale
    if grid.args.strategy != "block":
        return slopes.view_as(scale)
    assert grid.args.block_structure is not None
    height = grid.args.block_structure[0]
    padded = functional.pad(slopes, (0, 0, 0, -len(slopes) % height))
    return padded.view(-1, height, slopes.shape[1]).sum(1)


def _grouped(weight: Tensor, grid: Grid) -> Tensor:
    return functional.pad(weight, (0, -weight.shape[1] % grid.width)).view(len(weight), -1, grid.width)


def _flat(grouped: Tensor, like: Tensor) -> Tensor:
    return grouped.reshape(len(like), -1)[:, : like.shape[1]]
