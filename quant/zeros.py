"""Weights that were pruned stay zero when they are quantized."""

from __future__ import annotations

from torch import Tensor

# Dense weights are hardly ever exactly zero; whoever prunes removes more than this.
_LEAST_PRUNED = 0.001


def not_pruned(weight: Tensor) -> Tensor | None:
    """Which weights may become other than zero; None if the weight was not pruned."""
    stays = weight != 0
    return stays if stays.sum().item() < (1 - _LEAST_PRUNED) * weight.numel() else None
