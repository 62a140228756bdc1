"""Rounding with a scale for each row, computed from the row: how dynamic caches of keys and values are rounded, everywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from .activations import ActivationRounding

LARGEST_E4M3 = 448.0


class RowRounding:
    """To symmetric numbers with a scale for each row, or for each group of one; on a GPU nothing of it waits for the host.

    Scales and codes are compressed-tensors', but for one code. Integers reach from -2^(b-1) to 2^(b-1) - 1 and the scale is
    the row's largest magnitude over the middle of the two, so that a row's negative extreme divided by its scale is exactly
    -7.5 (of 4 bits): between two codes, and the last bit of a quotient, or of a key, would decide which. It is given the
    code that the exact quotient rounds to, half to even, which is the lowest.

    Args:
        args: the number format; with a ``group_size``, groups of the last dimension have scales of their own.
    """

    def __init__(self, args: QuantizationArgs) -> None:
        self._args = args
        least, most = code_range(args)
        self.half = (most - least) / 2

    def __call__(self, x: Tensor) -> Tensor:
        """``x``, rounded."""
        codes, scale = self.parts(x.unflatten(-1, (-1, self._args.group_size or x.shape[-1])))
        return (codes * scale).view_as(x)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, in the type of ``x``, and scales ``[..., 1]``, of rows that have one scale."""
        largest = x.abs().amax(-1, keepdim=True)
        # By a tensor: on a GPU torch multiplies by the reciprocal of a Python number.
        scale = largest / torch.full_like(largest, self.half)
        scale = scale.masked_fill(scale == 0, torch.finfo(x.dtype).eps)
        codes = nearest_code(x / scale, self._args)
        if self._args.type == "int":
            codes.masked_fill_((x == -largest) & (largest > 0), code_range(self._args)[0])
        return codes, scale


def cache_rounding(rounding: ActivationRounding) -> Callable[[Tensor], Tensor]:
    """What rounds keys or values ``[..., size]``, as calibration, transformers with Smelt's plug-in and the runtime all do it."""
    if rounding.args.dynamic is True and rounding.args.symmetric:
        return RowRounding(rounding.args)
    return rounding


def nearest_code(x: Tensor, args: QuantizationArgs) -> Tensor:
    """``x``, which is overwritten, to the nearest code, in its own type."""
    found = x.clamp_(*code_range(args))
    return found.to(torch.float8_e4m3fn).to(x.dtype) if args.type == "float" else found.round_()


def code_range(args: QuantizationArgs) -> tuple[float, float]:
    """The least and the largest code of integers, or of 8-bit floats."""
    if args.type == "float":
        return -LARGEST_E4M3, LARGEST_E4M3
    half = 2.0 ** (args.num_bits - 1)
    return -half, half - 1
