"""What a linear layer is to a decoder, and the plainest of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..quant.activations import rounded_inputs
from .matrix import Matrix


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
        self._inputs = matrix.inputs
        self._explanation = f"{str(dtype).removeprefix('torch.')} F.linear{restored_from(matrix, dtype)}"
        self.nbytes = self._weight.nbytes
        self.numel = self._weight.numel()
        self.columns = self._weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        if self._inputs is not None:
            x = rounded_inputs(x, self._inputs)
        return functional.linear(x, self._weight, self._bias)

    def explain(self) -> str:
        return self._explanation


def restored_from(matrix: Matrix, dtype: torch.dtype) -> str:
    """For people: that a weight is stored otherwise than it is computed with; empty if not."""
    as_stored = matrix.scale is None and matrix.format == str(dtype).removeprefix("torch.")
    return "" if as_stored else f", stored as {matrix.format}"
