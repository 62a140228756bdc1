"""The interface of a decoder's linear layers, and the plain implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ....system.hardware.pages import as_weight
from ...weights.matrix import Matrix
from ...weights.rounding import rounder, rounding_explanation


class Linear(Protocol):
    """A linear layer that is ready to compute.

    Attributes:
        nbytes: its memory.
        numel: elements of its weight.
        columns: width of its inputs.
        waits: whether the host waits for the device to round inputs (see gpu/input_rounding.py).
    """

    nbytes: int
    numel: int
    columns: int
    waits: bool

    def __call__(self, x: Tensor) -> Tensor:
        """``x [rows, columns]`` to ``[rows, outputs]``."""
        ...

    def explain(self) -> str:
        """A description of the kernel that computes it."""
        ...


class DenseLinear:
    """torch's linear, on weights restored when the model is loaded."""

    waits = False

    def __init__(
        self, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._weight = as_weight(matrix.dense(dtype).contiguous().to(device))
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
    """Linears of the same inputs that round them differently; their outputs are concatenated.

    Args:
        parts: at least one.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)
        self.numel = sum(part.numel for part in parts)
        self.columns = parts[0].columns
        self.waits = any(part.waits for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)

    def wants(self, rows: int) -> None:
        """No rounding before, as the parts differ."""

    def adds(self, rows: int) -> bool:
        """Adds no residual in the same launch."""
        return False

    def explain(self) -> str:
        return "; beside it ".join(dict.fromkeys(part.explain() for part in self._parts))


def restored_from(matrix: Matrix, dtype: torch.dtype) -> str:
    """A note that a weight is stored in another format than it is computed in; empty if not."""
    as_stored = matrix.scale is None and matrix.format == str(dtype).removeprefix("torch.")
    return "" if as_stored else f", stored as {matrix.format}"
