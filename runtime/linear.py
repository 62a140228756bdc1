"""Choosing what computes a linear, by its format, the device and the number of rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..quant.activations import rounded_inputs
from .cpu import Int8Linear
from .matrix import Matrix


class Linear(Protocol):
    """A linear layer that is ready to compute.

    Attributes:
        nbytes: what it holds in memory.
        numel: the numbers of its weight.
    """

    nbytes: int
    numel: int

    def __call__(self, x: Tensor) -> Tensor:
        """``x [rows, columns]`` to ``[rows, outputs]``."""
        ...

    def explain(self) -> str:
        """What computes it, for people."""
        ...


def linear(matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The fastest way that is known to compute with ``matrix`` here."""
    if Int8Linear.takes(matrix, dtype):
        return Int8Linear(matrix, bias, dtype)
    return DenseLinear(matrix, bias, dtype)


class DenseLinear:
    """torch's own linear, on values restored as the model was loaded."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = matrix.dense(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)
        self._inputs = matrix.inputs
        restored = matrix.scale is not None or matrix.format != str(self._weight.dtype).removeprefix("torch.")
        name = str(dtype).removeprefix("torch.")
        self._explanation = f"{name} F.linear" + (f", stored as {matrix.format}" if restored else "")
        self.nbytes = self._weight.nbytes
        self.numel = self._weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if self._inputs is not None:
            x = rounded_inputs(x, self._inputs)
        return functional.linear(x, self._weight, self._bias)

    def explain(self) -> str:
        return self._explanation
