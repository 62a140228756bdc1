"""Patterns of zeros: so many of each few neighbours stay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = re.compile(r"^(\d{1,4}):(\d{1,4})$")


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
        import torch

        groups = score.unflatten(-1, (-1, self.of))
        best = groups.topk(self.kept, -1).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, best, True).flatten(-2)
