"""Models on a GPU whose 8-bit codes stand in two planes, and drafters that read the upper one of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..decoder.linears.linear import Linear
from ..decoder.parts.operators import Experts, Operators
from ..fusions import Fusions
from ..weights.matrix import Matrix
from .linears import BytesLinear, PackedLinear, on_kernels
from .operators import GpuExperts, GpuOperators

_Part = Linear | Experts | None
T = TypeVar("T", bound=_Part)


class NestedGpuOperators(GpuOperators):
    """Like :class:`GpuOperators`, for a model and for a drafter inside it that takes no memory."""

    def __init__(self, dtype: torch.dtype, device: torch.device, fusions: Fusions | None = None) -> None:
        super().__init__(dtype, device, fusions)
        self._made: list[_Part] = []

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        return self._noted(super().linear(matrix, bias))

    def gated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        return self._noted(super().gated(matrix, bias, activation))

    def activated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        return self._noted(super().activated(matrix, bias, activation))

    def experts(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], activation: str) -> Experts | None:
        return self._noted(super().experts(gate_up, down, activation))

    def upper(self) -> Operators | None:
        if not any(_upper_of(part) for part in self._made):
            return None
        return _UpperGpuOperators(self.dtype, self.device, self._fusions, iter(self._made))

    def _on_kernels(self, matrix: Matrix, bias: Tensor | None, gate: str) -> PackedLinear | BytesLinear | None:
        return on_kernels(matrix, bias, self.dtype, self.device, self._tiles, gate, planes=True)

    def _noted(self, part: T) -> T:
        self._made.append(part)
        return part


class _UpperGpuOperators(GpuOperators):
    """Parts that were made already, in the same order."""

    def __init__(self, dtype: torch.dtype, device: torch.device, fusions: Fusions, made: Iterator[_Part]) -> None:
        super().__init__(dtype, device, fusions)
        self._left = made

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        return self._next()

    def gated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        return self._next()

    def activated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        return self._next()

    def experts(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], activation: str) -> Experts | None:
        return self._next()

    def _next(self) -> Any:
        made = next(self._left)
        return _upper_of(made) or made


def _upper_of(part: _Part) -> _Part:
    return part.upper() if isinstance(part, PackedLinear | GpuExperts) else None
