"""Linears on torch's native CPU operators for quantized weights."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ....quant.activations import is_int8_by_token
from ...weights.matrix import Matrix
from ...weights.rounding import FixedRounding, is_fixed_int8, rounding_explanation

_ZERO = 128  # oneDNN multiplies unsigned inputs with signed weights


def _product(codes: Tensor, factor: float, zero: int, weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    return torch.ops.onednn.qlinear_pointwise(
        codes, factor, zero, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def _takes_bytes() -> bool:
    """Whether products of whole bytes are right: without VNNI oneDNN adds up pairs of them in 16 bits, which hold only smaller ones."""
    size = 256
    weight = torch.ops.onednn.qlinear_prepack(torch.full((size, size), 127, dtype=torch.int8), None)
    most = torch.full((size, size), 255, dtype=torch.uint8)
    found = _product(most, 1.0, 0, weight, torch.ones(size), torch.zeros(size, dtype=torch.int32))
    return bool((found == 255 * 127 * size).all())


class Int8Linear:
    """Int8 weights by int8 inputs, accumulated exactly in int32; inputs have dynamic scales per row, or one static scale."""

    waits = False

    def __init__(self, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        assert matrix.scale is not None
        rows, self.columns = matrix.shape
        self._weight = torch.ops.onednn.qlinear_prepack(matrix.values.contiguous(), None)
        self._scale = matrix.scale.float().flatten().contiguous()
        self._zeros = torch.zeros(rows, dtype=torch.int32)
        self._bias = None if bias is None else bias.to(dtype)
        self.numel = matrix.values.numel()
        self.nbytes = self.numel + self._scale.nbytes
        assert matrix.inputs is not None
        fixed = is_fixed_int8(matrix.inputs)
        self._fixed = FixedRounding(matrix.inputs, dtype) if fixed else None
        rounded = rounding_explanation(matrix.inputs) if fixed else " and inputs"
        self._explanation = f"onednn.qlinear, int8 weights{rounded}"

    @staticmethod
    def takes(matrix: Matrix, dtype: torch.dtype) -> bool:
        """Whether a weight is of this kind: int8, one scale per row, inputs dynamically rounded to int8."""
        inputs = matrix.inputs
        return (
            dtype in (torch.float32, torch.bfloat16)
            and matrix.bits == 8
            and matrix.scale is not None
            and matrix.scale.shape[1] == 1
            and matrix.zero is None
            and inputs is not None
            and (is_int8_by_token(inputs.args) or is_fixed_int8(inputs))
            and torch.backends.mkldnn.is_available()
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self._fixed is not None:
            codes = self._fixed.codes(x).float()
            # NaN must reach the outputs and not vanish in a cast.
            scale = self._fixed.scale.float() + 0 * codes.sum(-1, keepdim=True)
        else:
            wide = x.float()
            scale = wide.abs().amax(-1, keepdim=True).div_(127.5)
            codes = (wide / scale).round_().clamp_(-128, 127)
        codes = codes.add_(_ZERO).to(torch.uint8)
        if _takes_bytes():
            out = self._product(codes, 1.0, _ZERO)
        else:
            out = self._product(codes >> 4, 16.0, _ZERO >> 4).add_(self._product(codes & 15, 1.0, 0))
        found = out.mul_(scale).to(x.dtype)
        return found if self._bias is None else found + self._bias

    def _product(self, codes: Tensor, factor: float, zero: int) -> Tensor:
        return _product(codes, factor, zero, self._weight, self._scale, self._zeros)

    def explain(self) -> str:
        return self._explanation
