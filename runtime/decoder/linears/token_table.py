"""The input embedding: plain rows, or codes of which only the looked-up rows are restored."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ...weights.matrix import Matrix


class TokenTable:
    """An embedding table.

    Args:
        matrix: the rows as they are stored.
        dtype: of the returned rows.
        device: where.

    Attributes:
        matrix: the rows in memory.
    """

    def __init__(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        if matrix.scale is None:
            self.matrix = Matrix.plain(matrix.values.to(device, dtype))
        else:
            kept = {name: getattr(matrix, name) for name in ("values", "scale", "zero", "order")}
            self.matrix = replace(matrix, **{name: t.to(device) for name, t in kept.items() if t is not None})
        self._dtype = dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        """The rows of some tokens."""
        if self.matrix.is_plain:
            return functional.embedding(tokens, self.matrix.values)
        return self.matrix.rows(tokens).dense(self._dtype)

    def equals(self, other: TokenTable) -> bool:
        """Whether both have the same rows, unquantized."""
        mine, its = self.matrix, other.matrix
        return mine.is_plain and its.is_plain and torch.equal(mine.values, its.values)

    @property
    def columns(self) -> int:
        """The width of a row."""
        return self.matrix.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return sum(t.nbytes for t in (self.matrix.values, self.matrix.scale, self.matrix.zero) if t is not None)
