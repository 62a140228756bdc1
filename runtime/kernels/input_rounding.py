"""Rounding inputs as a checkpoint's scheme says, for weights that are multiplied by 16 bits."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ...quant.activations import is_int8_by_token, rounded_inputs
from .linear_bytes import CHUNK
from .quantize_rows import round_rows


class InputRounding:
    """To codes and back; nothing if there is no scheme.

    Args:
        args: the scheme.

    Attributes:
        waits: whether torch's operators round, which send scalars to the device and wait.
    """

    def __init__(self, args: QuantizationArgs | None) -> None:
        self._args = args
        self._code = None if args is None else _code_of(args)
        self.waits = args is not None and self._code is None

    def __call__(self, x: Tensor) -> Tensor:
        """``x [rows, columns]``, rounded."""
        if self._args is None:
            return x
        if self._code is None:
            return rounded_inputs(x, self._args)
        return round_rows(x.contiguous(), self._code[0], by_block=self._code[1])


def is_e4m3(args: QuantizationArgs) -> bool:
    """Whether inputs are rounded to 8-bit floats as tensor cores have them."""
    return args.num_bits == 8 and args.type == "float" and args.symmetric is True


def _code_of(args: QuantizationArgs) -> tuple[torch.dtype, bool] | None:
    """What a kernel rounds to, and whether by 128 columns; None if it does not."""
    if is_int8_by_token(args):
        return torch.int8, False
    if is_e4m3(args) and args.strategy == "token":
        return torch.float8_e4m3fn, False
    if is_e4m3(args) and args.strategy == "group" and args.group_size == CHUNK:
        return torch.float8_e4m3fn, True
    return None
