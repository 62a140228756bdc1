"""N:M sparsity patterns: N of every M neighbouring weights stay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = re.compile(r"^(\d{1,4}):(\d{1,4})$")


@dataclass(frozen=True)
class Pattern:
    """An N:M pattern of zeros along a row, as sparse matrix units require it: 2:4 keeps two of four.

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
            ValueError: it is not a pattern.
        """
        match = _PATTERN.match(name)
        if match is None or not 0 < int(match[1]) < int(match[2]):
            raise ValueError(f"{name!r} is not a pattern such as 2:4")
        return cls(int(match[1]), int(match[2]))

    def keep(self, score: Tensor) -> Tensor:
        """The best of each group along the last dimension, whose size is a multiple of ``of``."""
        import torch

        groups = score.unflatten(-1, (-1, self.of))
        best = groups.topk(self.kept, -1).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, best, True).flatten(-2)
