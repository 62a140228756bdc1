"""Models whose 8-bit codes stand in two planes, and drafters that read the upper one of each."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from torch import Tensor

from ..decoder.linears.linear import Linear
from ..decoder.parts.operators import Operators
from ..weights.matrix import Matrix
from .linears import CodesLinear
from .operators import NativeOperators


class NestedOperators(NativeOperators):
    """Like :class:`NativeOperators`, for a model and for a drafter inside it that takes no memory.

    Inputs are rounded to int8 for any number of rows, so that a token is the same with and without drafts.

    Args:
        kernels: the compiled module.
        exact: whether inputs keep 16 bits instead.
    """

    def __init__(self, kernels: ModuleType, exact: bool) -> None:
        super().__init__(kernels, exact, few_exact=False)
        self._made: list[Linear] = []

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        if CodesLinear.nests(matrix):
            found: Linear = CodesLinear(self._kernels, matrix, bias, self._exact, few_exact=False, planes=True)
        else:
            found = super().linear(matrix, bias)
        self._made.append(found)
        return found

    def upper(self) -> Operators | None:
        if not any(isinstance(each, CodesLinear) and each.upper() is not None for each in self._made):
            return None
        return _UpperOperators(self._kernels, self._exact, iter(self._made))


class _UpperOperators(NativeOperators):
    """Linears that were made already, in the same order."""

    def __init__(self, kernels: ModuleType, exact: bool, made: Iterator[Linear]) -> None:
        super().__init__(kernels, exact)
        self._left = made

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        made = next(self._left)
        return (made.upper() if isinstance(made, CodesLinear) else None) or made
