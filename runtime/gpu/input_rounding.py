"""Rounding inputs by a checkpoint's scheme, for weights that are multiplied by 16-bit inputs."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ...quant.activations import ActivationRounding, is_int8_by_token
from ..kernels.linear.linear_bytes import CHUNK
from ..kernels.rows.quantize_rows import round_rows
from ..weights.rounding import is_fixed, rounder


class InputRounding:
    """Fake quantization; the identity without a scheme.

    Args:
        rounding: the scheme, and the scale if it is static.
        dtype: of inputs.
        device: where.

    Attributes:
        waits: whether compressed-tensors' code rounds, which synchronizes with the device.
    """

    def __init__(self, rounding: ActivationRounding | None, dtype: torch.dtype, device: torch.device) -> None:
        self._code = None if rounding is None else _code_of(rounding.args)
        self._round = None if rounding is None or self._code else rounder(rounding, dtype, device)
        self.waits = self._round is not None and rounding is not None and not is_fixed(rounding)

    def __call__(self, x: Tensor) -> Tensor:
        """``x [rows, columns]``, rounded."""
        if self._code is not None:
            return round_rows(x.contiguous(), self._code[0], by_block=self._code[1])
        return x if self._round is None else self._round(x)


def is_e4m3(args: QuantizationArgs) -> bool:
    """Whether inputs are rounded to the tensor cores' 8-bit floats, with dynamic scales."""
    return args.num_bits == 8 and args.type == "float" and args.symmetric is True and args.dynamic is True


def _code_of(args: QuantizationArgs) -> tuple[torch.dtype, bool] | None:
    """A kernel's target dtype, and whether by 128 columns; None if no kernel rounds."""
    if is_int8_by_token(args):
        return torch.int8, False
    if is_e4m3(args) and args.strategy == "token":
        return torch.float8_e4m3fn, False
    if is_e4m3(args) and args.strategy == "group" and args.group_size == CHUNK:
        return torch.float8_e4m3fn, True
    return None
