"""Allocation of sparsity to layers by their outliers (Yin et al., 2024, OWL, arXiv:2310.05175)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# The paper's: outliers are scores above this multiple of the mean; layers differ by at most this from the average.
MULTIPLE, REACH = 5.0, 0.08


def outlier_share(scores: Iterable[Tensor]) -> float:
    """The share of a layer's scores above a multiple of their mean."""
    each = [score.float().flatten() for score in scores]
    count = sum(score.numel() for score in each)
    mean = sum(score.sum(dtype=torch.float64).item() for score in each) / count
    return sum(int((score > MULTIPLE * mean).sum()) for score in each) / count


def by_outliers(shares: Sequence[float], sparsity: float) -> list[float]:
    """The sparsity of each layer: lower with more outliers, with the requested average over layers.

    Args:
        shares: each layer's share of outliers.
        sparsity: the average.
    """
    ratios = torch.tensor(shares, dtype=torch.float64)
    apart = ratios.max() - ratios.min()
    scaled = (ratios - ratios.min()) / apart * 2 * REACH if apart > 0 else torch.zeros_like(ratios)
    density = scaled - scaled.mean() + (1 - sparsity)
    return (1 - density).clamp(0.0, 0.999).tolist()
