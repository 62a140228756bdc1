"""Linears on the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from types import ModuleType
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from ...quant.activations import is_int8_by_token
from ...system.hardware.pages import in_large_pages
from ..weights.matrix import Matrix
from ..weights.rounding import is_fixed_int8, rounding_explanation
from .library import processor_features

_TILE = 32  # outputs that a tile of codes holds
# Up to this many rows inputs keep 16 bits: reading the weight dominates, and fewer bits would gain little.
_EXACT_ROWS = 2
# Group size of inputs, where the checkpoint does not round them. Sums of 16 bits by 8 fit in 32 bits up to the largest one.
_TOGETHER = (128, 64, 32, 16, 8)
# More products of 255 by 128 might not fit in 32 bits.
_LONGEST_SUM = 1 << 16
_ANY = 1 << 62


class CodesLinear:
    """4- or 8-bit codes, multiplied as stored; 2- and 3-bit codes are widened to 4 bits.

    Inputs of few rows are rounded to 16 bits, so that bfloat16 numbers down to a 64th of the largest in their group are exact; those
    of more rows to int8, unless ``exact``, which takes twice as many products. Without ``few_exact`` the inputs of few
    rows are rounded to int8, too. In either case a row's results do not depend on the other rows.

    With ``planes``, codes of 8 bits stand in two planes of 4 bits, of which :meth:`upper` reads one.
    """

    waits = False

    def __init__(
        self,
        kernels: ModuleType,
        matrix: Matrix,
        bias: Tensor | None,
        exact: bool,
        *,
        few_exact: bool = True,
        planes: bool = False,
    ) -> None:
        assert matrix.scale is not None
        self._kernels = kernels
        self._rows, self.columns = matrix.shape
        self._bits = _kept_bits(matrix)
        self._wide = matrix.scale.dtype != torch.bfloat16
        self._lower: Tensor | None = None
        if planes:
            self._codes = in_large_pages(packed_codes(matrix.values >> 4, 4))
            self._lower = in_large_pages(packed_codes((matrix.values & 15) - 8, 4))
        else:
            self._codes = in_large_pages(packed_codes(matrix.values, self._bits))
        self._scale = _tiled(matrix.scale.float() if self._wide else matrix.scale)
        half = 1 << (self._bits - 1)
        self._zero = None if matrix.zero is None else _tiled((matrix.zero.int() + half).to(torch.uint8))
        self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self._order = matrix.order
        fixed = 0.0
        if matrix.inputs is not None and matrix.inputs.scale is not None:
            # In bfloat16, like the inputs.
            fixed = float(matrix.inputs.scale.bfloat16())
            self._group, self._exact = matrix.group, 0
        elif matrix.inputs is not None:
            self._group, self._exact = self.columns, 0
        else:
            self._group = next(size for size in _TOGETHER if matrix.group % size == 0)
            self._exact = 1 << 62 if exact else _EXACT_ROWS if few_exact else 0
        self._input_scale = fixed
        self._weight_group = matrix.group
        self.handle = self._handle()
        self.numel = matrix.values.numel()
        parts = (self._codes, self._lower, self._scale, self._zero)
        self.nbytes = sum(part.nbytes for part in parts if part is not None)
        self._explanation = self._explained(matrix)

    def _handle(self, *, upper: bool = False) -> object:
        codes = self._kernels.Codes(
            codes=self._codes.data_ptr(),
            scales=self._scale.data_ptr(),
            zeros=_address(self._zero),
            bias=_address(self._bias),
            outputs=self._rows,
            columns=self.columns,
            group=self._weight_group,
            bits=self._bits,
            wide_scales=self._wide,
            input_scale=self._input_scale,
            lower=_address(self._lower),
            upper=upper,
        )
        return self._kernels.Linear.of_codes(codes, self._group, self._exact)

    def upper(self) -> Self | None:
        """The linear of the upper four of 8 bits, in the same memory; None if they are not a plane of their own."""
        if self._lower is None:
            return None
        found = copy(self)
        found._lower, found._bits, found._exact = None, 4, 0
        found.handle = found._handle(upper=True)
        found.nbytes = self.nbytes - self._lower.nbytes
        found._explanation = "Smelt's kernel, the upper 4 of 8 bits"
        return found

    @staticmethod
    def nests(matrix: Matrix) -> bool:
        """Whether the upper four bits of a weight's codes could be read alone."""
        whole = matrix.bits == 8 and matrix.zero is None and matrix.inputs is None
        return whole and CodesLinear.takes(matrix) and matrix.group % 8 == 0

    @staticmethod
    def takes(matrix: Matrix) -> bool:
        """Whether a weight is of this kind."""
        if matrix.scale is None or not 2 <= matrix.bits <= 8 or matrix.scale.dim() != 2:
            return False
        step = 8 if _kept_bits(matrix) == 4 else 4
        if matrix.inputs is not None and not is_fixed_int8(matrix.inputs):
            by_row = matrix.scale.shape[1] == 1 and is_int8_by_token(matrix.inputs.args)
            return by_row and matrix.shape[1] % step == 0 and matrix.shape[1] <= _LONGEST_SUM
        fits = matrix.zero is None or int(matrix.zero.min()) >= -(1 << (_kept_bits(matrix) - 1))
        short = matrix.inputs is None or matrix.group <= _LONGEST_SUM
        return fits and short and matrix.group % 8 == 0

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        assert x.shape[1] == self.columns, "the kernel sees no shapes"
        out = torch.empty(rows, self._rows, dtype=torch.bfloat16)
        if rows:
            x = x.contiguous() if self._order is None else x.index_select(1, self._order)
            self._kernels.linear(self.handle, x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads())
        return out

    @property
    def reads_in_order(self) -> bool:
        """Whether the kernel needs no reordering: columns in activation order need permuted inputs."""
        return self._order is None

    def explain(self) -> str:
        return self._explanation

    def _explained(self, matrix: Matrix) -> str:
        kept = f", kept in {self._bits} bits" if matrix.bits != self._bits else ""
        if matrix.inputs is not None:
            rounded = rounding_explanation(matrix.inputs) if is_fixed_int8(matrix.inputs) else ", int8 inputs by token"
            return f"Smelt's kernel, {matrix.format} weights{kept}{rounded}"
        if self._exact > 1 << 32:
            return f"Smelt's kernel, {matrix.format} weights{kept}, inputs of 16 bits in groups of {self._group}"
        tiles = ", many rows on matrix tiles" if self._kernels.tiles_are_used() and self._group % 32 == 0 else ""
        if self._exact == 0:
            return f"Smelt's kernel, {matrix.format} weights{kept}, int8 inputs in groups of {self._group}{tiles}"
        many = f"then int8 in groups of {self._group}{tiles}"
        return f"Smelt's kernel, {matrix.format} weights{kept}, inputs of 16 bits up to {self._exact} rows, {many}"


def dense_rows(kernels: ModuleType) -> int:
    """Up to how many rows bfloat16 weights are multiplied by our kernel rather than torch's.

    Any number on AMX tiles, and where there are no instructions for bfloat16: there it is as fast or faster (at 512 rows on tiles within
    5%), and a row's results never depend on the others. Where torch has AMX and we do not, as few as take no longer than reading the weight.
    """
    features = processor_features()
    if kernels.dense_tiles_are_used() or "avx512_bf16" not in features:
        return _ANY
    return 8 if "amx_bf16" in features else 64


class NativeDenseLinear:
    """bfloat16 weights: a memory-bound kernel for few rows, torch's product for more than :func:`dense_rows`.

    With ``any_rows`` the kernel computes them all, so that a row's results do not depend on the other rows.

    Attributes:
        same_rows: up to how many rows they do not; None for any number.
    """

    waits = False

    def __init__(
        self, kernels: ModuleType, weight: Tensor, bias: Tensor | None, suffix: str, *, any_rows: bool = False
    ) -> None:
        self._kernels = kernels
        self._most = _ANY if any_rows else dense_rows(kernels)
        self.same_rows = None if self._most == _ANY else self._most
        self._weight = in_large_pages(weight)
        self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        outputs, columns = weight.shape
        self.handle = kernels.Linear.of_dense(
            weight=self._weight.data_ptr(), bias=_address(self._bias), outputs=outputs, columns=columns
        )
        self.numel = weight.numel()
        self.columns = weight.shape[1]
        self.nbytes = weight.nbytes
        tiles = " on matrix tiles" if kernels.dense_tiles_are_used() else ""
        more = "" if self.same_rows is None else f" up to {self.same_rows} rows, then F.linear"
        self._explanation = f"Smelt's kernel{tiles}{more}, bfloat16{suffix}"

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > self._most or rows == 0:
            return functional.linear(x, self._weight, self._bias)
        return self._by(self._kernels.linear, x)

    def on_tiles(self, x: Tensor) -> Tensor:
        """What AMX tiles give, or would give: emulated, slowly, where they are not used."""
        return self._by(self._kernels.dense_tiles, x)

    def _by(self, kernel: Callable[..., None], x: Tensor) -> Tensor:
        assert x.shape[1] == self.columns, "the kernel sees no shapes"
        out = torch.empty(x.shape[0], self._weight.shape[0], dtype=torch.bfloat16)
        x = x.contiguous()
        kernel(self.handle, x.data_ptr(), x.shape[0], out.data_ptr(), torch.get_num_threads())
        return out

    def explain(self) -> str:
        return self._explanation


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Signed codes ``[rows, columns]`` in the order in which ``linear_codes.cpp`` reads them."""
    rows, columns = codes.shape
    tiles = -(-rows // _TILE)
    unsigned = torch.zeros(tiles * _TILE, columns, dtype=torch.uint8)
    unsigned[:rows] = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if bits == 8:
        return unsigned.view(tiles, 2, 16, columns // 4, 4).permute(0, 3, 1, 2, 4).contiguous()
    pairs = unsigned.view(tiles, 2, 16, columns // 8, 2, 4)
    return (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).permute(0, 3, 1, 2, 4).contiguous()


def _tiled(values: Tensor) -> Tensor:
    """``[rows, groups]`` as ``[tile][group][32]``."""
    rows, groups = values.shape
    tiles = -(-rows // _TILE)
    padded = torch.zeros(tiles * _TILE, groups, dtype=values.dtype)
    padded[:rows] = values
    return padded.view(tiles, _TILE, groups).transpose(1, 2).contiguous()


def _kept_bits(matrix: Matrix) -> int:
    return 4 if matrix.bits <= 4 else 8


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
