"""Which weights stay: so many of each few neighbours, or so many of each row, or of the whole matrix."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

_PATTERN = re.compile(r"^(\d+):(\d+)$")


@dataclass(frozen=True)
class Pattern:
    """So many zeros among so many neighbours of a row, as sparse matrix units take them: 2:4 leaves two of four.

    Attributes:
        kept: how many stay.
        of: of how many.
    """

    kept: int
    of: int

    @classmethod
    def named(cls, name: str) -> Pattern:
        """The pattern called ``2:4`` or ``4:8``.

        Raises:
            ValueError: it is none.
        """
        match = _PATTERN.match(name)
        if match is None or not 0 < int(match[1]) < int(match[2]):
            raise ValueError(f"{name!r} is no pattern such as 2:4")
        return cls(int(match[1]), int(match[2]))

    def keep(self, score: Tensor) -> Tensor:
        """The best of each group along the last dimension, whose size ``of`` divides."""
        groups = score.unflatten(-1, (-1, self.of))
        best = groups.topk(self.kept, -1).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, best, True).flatten(-2)


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
