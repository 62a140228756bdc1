"""Batch-invariant decoder parts for a reproducible engine: a token's results depend bitwise on its own sequence alone.

Elsewhere the fastest kernel is chosen by the number of rows, and kernels sum in different orders or round inputs to int8 or 16 bits; so
other requests and chunked prefill change a request's last bits. Here each part has one kernel for any number of rows, which
sums each row in one order: quantized weights multiply inputs rounded to int8 (or 16 bits, with exact inputs),
bfloat16 weights use our product for prompts, too, and every token of a prompt attends as in decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from ..decoder.linears.linear import Linear, restored_from
from ..decoder.parts.operators import Attention, Rowwise
from ..heads import Heads
from ..weights.matrix import Matrix
from ..weights.rounding import rounder, rounding_explanation
from .cache import LARGEST_HEAD
from .linears import CodesLinear, NativeDenseLinear
from .operators import NativeAttention, NativeOperators


class ReproducibleOperators(NativeOperators):
    """Like :class:`NativeOperators`, with each row computed independently of the others.

    Args:
        kernels: the compiled module.
        exact: whether inputs of weight-only formats keep 16 bits, for all rows; otherwise they are rounded to int8 for all.
    """

    takes_adapters = False

    def __init__(self, kernels: ModuleType, exact: bool) -> None:
        super().__init__(kernels, exact)

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        if CodesLinear.takes(matrix):
            return CodesLinear(self._kernels, matrix, bias, self._exact, few_exact=False)
        suffix = restored_from(matrix, torch.bfloat16)
        dense = NativeDenseLinear(self._kernels, matrix.dense(torch.bfloat16), bias, suffix, any_rows=True)
        if matrix.inputs is None:
            return dense
        if matrix.inputs.args.dynamic is True and matrix.inputs.args.strategy == "tensor":
            raise RuntimeProblem(
                "reproducible: the checkpoint rounds a linear's inputs with one scale for all tokens of a batch, so results depend"
                " on the other requests; leave reproducible off, or quantize with scales by token"
            )
        return _RoundedInputs(rounder(matrix.inputs, torch.bfloat16), dense, rounding_explanation(matrix.inputs))

    def router(self, weight: Tensor) -> Rowwise:
        return self.linear(Matrix.plain(weight), None)

    def attention(self, heads: Heads) -> Attention:
        if heads.size > LARGEST_HEAD:
            raise RuntimeProblem(
                f"reproducible: the compiled kernel takes heads of up to {LARGEST_HEAD} elements, not {heads.size};"
                " leave reproducible off"
            )
        return NativeAttention(self._kernels, heads, each_alone=True)


class _RoundedInputs:
    """A linear whose inputs are rounded first, as the checkpoint requires."""

    waits = False

    def __init__(self, rounded: Callable[[Tensor], Tensor], linear: NativeDenseLinear, suffix: str) -> None:
        self._rounded, self._linear, self._suffix = rounded, linear, suffix
        self.nbytes, self.numel, self.columns = linear.nbytes, linear.numel, linear.columns

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(self._rounded(x))

    def explain(self) -> str:
        return self._linear.explain() + self._suffix
