"""Linears on torch's native CPU operators for quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.activations import is_int8_by_token
from .matrix import Matrix

_ZERO = 128  # oneDNN multiplies unsigned inputs with signed weights


class Int8Linear:
    """Int8 weights by int8 inputs, each row of inputs with a scale of its own, summed up exactly in int32."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        assert matrix.scale is not None
        rows, self.columns = matrix.shape
        self._weight = torch.ops.onednn.qlinear_prepack(matrix.values.contiguous(), None)
        self._scale = matrix.scale.float().flatten().contiguous()
        self._zeros = torch.zeros(rows, dtype=torch.int32)
        self._bias = None if bias is None else bias.to(dtype)
        self.numel = matrix.values.numel()
        self.nbytes = self.numel + self._scale.nbytes
        self._explanation = "onednn.qlinear, int8 weights and inputs"

    @staticmethod
    def takes(matrix: Matrix, dtype: torch.dtype) -> bool:
        """Whether a weight is of this kind: int8, a scale a row, its inputs rounded to int8 as they come."""
        inputs = matrix.inputs
        return (
            dtype in (torch.float32, torch.bfloat16)
            and matrix.bits == 8
            and matrix.scale is not None
            and matrix.scale.shape[1] == 1
            and matrix.zero is None
            and inputs is not None
            and is_int8_by_token(inputs)
            and torch.backends.mkldnn.is_available()
        )

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).div_(127.5)
        codes = (wide / scale).round_().clamp_(-128, 127).add_(_ZERO).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _ZERO, self._weight, self._scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        found = out.mul_(scale).to(x.dtype)
        return found if self._bias is None else found + self._bias

    def explain(self) -> str:
        return self._explanation
