"""Principal directions of the residual stream (Ashkboos et al., 2024, SliceGPT, arXiv:2401.15024)."""

from __future__ import annotations

import torch
from torch import Tensor


class Directions:
    """Accumulates the covariance of hidden states, each scaled to length one.

    Norms rescale their inputs, so long vectors matter no more than short ones.

    Args:
        width: the hidden size.

    Attributes:
        sums: ``[width, width]`` in float64, the sum of x xT so far.
    """

    def __init__(self, width: int) -> None:
        self.sums = torch.zeros(width, width, dtype=torch.float64)

    def add(self, hidden: Tensor) -> None:
        """Add ``[..., width]``."""
        rows = hidden.flatten(0, -2).float()
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        self.sums += (rows.T @ rows).to(self.sums.device)

    def rotation(self) -> tuple[Tensor, Tensor]:
        """An orthogonal matrix whose first columns are the directions of most variance, and each one's share of it."""
        # In float32, so that the summation order of processes does not matter.
        values, vectors = torch.linalg.eigh(self.sums.float().double())
        return vectors.flip(1).contiguous(), shares_of(values.clamp_min(0).flip(0))


def shares_of(sizes: Tensor) -> Tensor:
    """Each one's share of the sum of all."""
    return sizes / sizes.sum().clamp_min(1e-30)
