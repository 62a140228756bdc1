"""How a sparsity is shared out over layers by their outliers (Yin et al., 2024, OWL, arXiv:2310.05175)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# The paper's: what is so many times the mean is an outlier, and layers differ by at most so much from the average.
MULTIPLE, REACH = 5.0, 0.08


def outlier_share(scores: Iterable[Tensor], multiple: float = MULTIPLE) -> float:
    """Which share of all scores of a layer is larger than some times their mean."""
    each = [score.float().flatten() for score in scores]
    count = sum(score.numel() for score in each)
    mean = sum(score.sum(dtype=torch.float64).item() for score in each) / count
    return sum(int((score > multiple * mean).sum()) for score in each) / count


def by_outliers(shares: Sequence[float], sparsity: float, reach: float = REACH) -> list[float]:
    """The sparsity of each layer: less where there are more outliers, and on average over layers what is asked for.

    Args:
        shares: each layer's outliers.
        sparsity: the average.
        reach: the densest and the sparsest layer are twice this apart.
    """
    ratios = torch.tensor(shares, dtype=torch.float64)
    apart = ratios.max() - ratios.min()
    scaled = (ratios - ratios.min()) / apart * 2 * reach if apart > 0 else torch.zeros_like(ratios)
    density = scaled - scaled.mean() + (1 - sparsity)
    return (1 - density).clamp(0.0, 0.999).tolist()
