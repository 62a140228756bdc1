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
        """Whether both store the same rows."""
        mine, its = self.matrix, other.matrix
        pairs = ((mine.values, its.values), (mine.scale, its.scale), (mine.zero, its.zero), (mine.order, its.order))
        return self._dtype == other._dtype and all(
            (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
            for a, b in pairs
        )

    @property
    def columns(self) -> int:
        """The width of a row."""
        return self.matrix.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return sum(t.nbytes for t in (self.matrix.values, self.matrix.scale, self.matrix.zero) if t is not None)
