"""Which weights to remove while columns are settled: those with the least cost after the remaining columns compensate.

The score is SparseGPT's (Frantar and Alistarh, 2023, arXiv:2301.00774), of the compensated weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import Pattern
from ..sparsity import keep_share
from .columns import Next
from .options.gptq import AT_A_TIME


class Removal:
    """Chooses, as columns come, which of their weights stay.

    Args:
        keep: a pattern; or a share to remove from each 128 columns; or a mask of those that stay, ``[rows, columns]``, if
            another score chose them.
        cost: the cost of an error in each column, in reverse of the order in which columns are settled.
        backwards: the columns' numbers in that order. For a pattern they must be those of the weight, reversed.

    Attributes:
        stays: ``[columns, rows]``, which weights stay, as far as known.
        coming: called before columns are removed, ``together`` at a time; None if all is known.
        together: how many.
    """

    def __init__(self, keep: Pattern | float | Tensor, cost: Tensor, backwards: Tensor, rows: int) -> None:
        self._keep, self._cost = keep, cost[:, None]
        self.stays = torch.zeros(len(backwards), rows, dtype=torch.bool, device=cost.device)
        self.coming: Next | None = self._choose
        if isinstance(keep, Tensor):
            self.stays |= keep.T[backwards]
            self.coming = None
        self.together = keep.of if isinstance(keep, Pattern) else AT_A_TIME

    def likely(self, columns: Tensor) -> Tensor:
        """Which weights would stay if none changed before its turn, ``[columns, rows]``."""
        return self._kept(columns, slice(0, len(columns)))

    def _choose(self, part: slice, wanted: Tensor) -> None:
        self.stays[part] = self._kept(wanted, part)

    def _kept(self, wanted: Tensor, part: slice) -> Tensor:
        if isinstance(self._keep, Tensor):
            return self.stays[part]
        score = (wanted.square() * self._cost[part]).T
        if isinstance(self._keep, Pattern):
            return self._keep.keep(score).T
        return keep_share(score, self._keep, by_row=False).T
