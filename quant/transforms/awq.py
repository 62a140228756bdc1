"""AWQ: protect the columns that large inputs meet (Lin et al., 2024, arXiv:2306.00978)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import rounded_inputs
from ..grid import Grid
from ..layer_stats import LayerStats
from .clip import clip
from .link import Link, Readers
from .options.awq import AwqOptions
from .options.clip import ClipOptions

_LEAST = 1e-4


def awq(link: Link, options: AwqOptions) -> None:
    """Scale columns by the mean magnitude of their inputs to the power that lowers the readers' output error most.

    The error is that of rounding to nearest, on a sample of the calibration inputs, with the inputs rounded too
    where the scheme rounds them. No scaling at all is among the candidates.
    """
    groups = [group for group in link.groups if group.quantized and group.stats.tokens]
    if not groups:
        return
    tokens = sum(group.stats.tokens for group in groups)
    inputs = link.mean(sum(group.stats.rows.float().abs().mean(0) * (group.stats.tokens / tokens) for group in groups))  # type: ignore[arg-type]
    columns = link.mean(torch.stack([_column_share(r.weight) for group in groups for r in group.quantized]).mean(0))
    best, best_loss = None, _loss(link, groups, None)
    for weigh in (False, True) if options.weigh_columns is None else (options.weigh_columns,):
        for step in range(0 if weigh else 1, options.steps + 1):
            ratio = step / options.steps
            factors = inputs.clamp_min(_LEAST) ** ratio
            if weigh:
                factors = factors / columns.clamp_min(_LEAST) ** (1 - ratio)
            factors = factors.clamp_min(_LEAST)
            factors /= (factors.amax() * factors.amin()).sqrt()
            loss = _loss(link, groups, factors)
            if loss < best_loss:
                best, best_loss = factors, loss
    if best is not None:
        link.move(best)


def awq_range(weight: Tensor, grid: Grid, stats: LayerStats, options: AwqOptions) -> Grid:
    """The second half of the paper's method: see :func:`smelt.quant.transforms.clip.clip`."""
    return clip(weight, grid, stats, ClipOptions()) if options.clip else grid


def _loss(link: Link, groups: list[Readers], factors: Tensor | None) -> float:
    """Squared error of the readers' outputs, summed over groups as often as tokens reach them."""
    scale = torch.ones(len(link.places)) if factors is None else factors[link.places]
    total = 0.0
    for group in groups:
        rows = group.stats.rows
        for reader in group.quantized:
            assert reader.scheme is not None
            scaled = reader.weight * scale
            rounded = Grid.fit(scaled, reader.scheme.args, link.feeder.stored).round(scaled)
            inputs = reader.scheme.activations
            if inputs is None:
                error = rows @ ((rounded / scale) - reader.weight).to(rows.dtype).T
            else:
                seen = rounded_inputs((rows / scale).to(rows.dtype), inputs)
                error = seen @ rounded.to(rows.dtype).T - rows @ reader.weight.to(rows.dtype).T
            total += error.float().square().mean().item() * reader.weight.shape[0] * group.stats.tokens
    return total


def _column_share(weight: Tensor) -> Tensor:
    """Mean magnitude of each column, every row first taken relative to its largest weight."""
    return (weight.abs() / weight.abs().amax(1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)).mean(0)
