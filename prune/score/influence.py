"""Block influence: how much a block changes the hidden states' direction (Men et al., 2024, arXiv:2403.03853)."""

from __future__ import annotations

import torch
from torch import Tensor


class Influence:
    """One minus the mean cosine between the hidden states that enter a block and those that leave it.

    Attributes:
        sums: float64 ``[2]``: the cosines' sum and count, to be summed over processes.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add some tokens: ``[..., width]`` before and after the block."""
        cosines = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
        self.sums += torch.tensor([cosines.sum(dtype=torch.float64).item(), cosines.numel()], dtype=torch.float64)

    @property
    def value(self) -> float:
        """Between 0, if the block changes only lengths, and 2."""
        total, count = self.sums.tolist()
        return 1 - total / count
