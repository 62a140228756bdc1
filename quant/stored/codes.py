"""Integer codes with scales: what every format that stores them is written from and read to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """A weight ``[rows, columns]`` as integer codes.

    Attributes:
        values: int8 ``[rows, columns]``, between ``-2^(bits-1)`` and ``2^(bits-1) - 1``, in the inputs' order.
        bits: of each code.
        scale: ``[rows, groups]``.
        zero: int8 ``[rows, groups]``, subtracted from codes; None for zeros.
        places: ``[columns]``, the group of each column; None if groups are contiguous columns of equal size.
    """

    values: Tensor
    bits: int
    scale: Tensor
    zero: Tensor | None = None
    places: Tensor | None = None

    def zeros(self) -> Tensor:
        """The zero-points, also where all are zero."""
        return torch.zeros(self.scale.shape, dtype=torch.int8) if self.zero is None else self.zero
