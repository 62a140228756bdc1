"""What a linear layer is to a decoder, and the plainest of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..weights.matrix import Matrix
from ..weights.rounding import rounder, rounding_explanation


class Linear(Protocol):
    """A linear layer that is ready to compute.

    Attributes:
        nbytes: what it holds in memory.
        numel: the numbers of its weight.
        columns: how wide its inputs are.
    """

    nbytes: int
    numel: int
    columns: int

    def __call__(self, x: Tensor) -> Tensor:
        """``x [rows, columns]`` to ``[rows, outputs]``."""
        ...

    def explain(self) -> str:
        """What computes it, for people."""
        ...


class DenseLinear:
    """torch's own linear, on values restored as the model was loaded."""

    def __init__(
        self, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._weight = matrix.dense(dtype).contiguous().to(device)
        self._bias = None if bias is None else bias.to(device, dtype)
        self._round = None if matrix.inputs is None else rounder(matrix.inputs, dtype, device)
        name = str(dtype).removeprefix("torch.")
        self._explanation = f"{name} F.linear{restored_from(matrix, dtype)}{rounding_explanation(matrix.inputs)}"
        self.nbytes = self._weight.nbytes
        self.numel = self._weight.numel()
        self.columns = self._weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        if self._round is not None:
            x = self._round(x)
        return functional.linear(x, self._weight, self._bias)

    def explain(self) -> str:
        return self._explanation


class SideBySide:
    """Linears of the same inputs, of which each rounds them in its own way; their outputs one after another.

    Args:
        parts: at least one.

    Attributes:
        waits: whether the host waits for the device in any of them (see kernels/input_rounding.py).
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)
        self.numel = sum(part.numel for part in parts)
        self.columns = parts[0].columns
        self.waits = any(getattr(part, "waits", False) for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)

    def wants(self, rows: int) -> None:
        """No rounding before: not all want the same."""

    def adds(self, rows: int) -> bool:
        """Nothing in the same launch."""
        return False

    def explain(self) -> str:
        return "; beside it ".join(dict.fromkeys(part.explain() for part in self._parts))


def restored_from(matrix: Matrix, dtype: torch.dtype) -> str:
    """For people: that a weight is stored otherwise than it is computed with; empty if not."""
    as_stored = matrix.scale is None and matrix.format == str(dtype).removeprefix("torch.")
    return "" if as_stored else f", stored as {matrix.format}"
