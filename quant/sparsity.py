"""Which weights stay: so many of each row, or of the whole matrix; see pattern.py for so many of each few neighbours."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_share(score: Tensor, sparsity: float, *, by_row: bool) -> Tensor:
    """The best weights of each row, or of all; ``sparsity`` is the share that goes, to the nearest whole number.

    Args:
        score: ``[rows, columns]``.
        sparsity: at least 0, less than 1.
        by_row: compare weights of one row only, as Wanda does.
    """
    compared = score if by_row else score.reshape(1, -1)
    gone = round(sparsity * compared.shape[1])
    worst = compared.topk(gone, 1, largest=False).indices
    return torch.ones_like(compared, dtype=torch.bool).scatter_(1, worst, False).view(score.shape)
