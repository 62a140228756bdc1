"""Rounding inputs, keys and values as a checkpoint says, by compressed-tensors' arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ..quant.activations import ActivationRounding

LARGEST_E4M3 = 448.0


class FixedRounding:
    """To numbers with a scale that calibration fixed; on a GPU nothing of it waits for the host.

    Args:
        rounding: the numbers and the scale, which is broadcast to what is rounded.
        dtype: of what is rounded, which is also what is computed in.
        device: where.

    Attributes:
        scale: in that type.
    """

    def __init__(self, rounding: ActivationRounding, dtype: torch.dtype, device: torch.device | None = None) -> None:
        assert is_fixed(rounding)
        assert rounding.scale is not None
        self._args, zero = rounding.args, rounding.zero
        self.scale = rounding.scale.to(device, dtype)
        self._zero = None if zero is None else zero.to(device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """``x``, rounded."""
        return self.codes(x) * self.scale

    def codes(self, x: Tensor) -> Tensor:
        """What is multiplied by the scale, in the type of ``x``; less the zero-point, if there is one."""
        found = x / self.scale
        if self._zero is None:
            return nearest_code(found, self._args)
        return nearest_code(found.add_(self._zero), self._args).sub_(self._zero)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scale."""
        return self.codes(x), self.scale


class RowRounding:
    """To symmetric numbers with a scale for each row, computed from it; on a GPU nothing of it waits for the host."""

    def __init__(self, args: QuantizationArgs) -> None:
        self._args = args
        least, most = code_range(args)
        self.half = (most - least) / 2

    def __call__(self, x: Tensor) -> Tensor:
        """``x``, rounded."""
        codes, scale = self.parts(x)
        return codes * scale

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, in the type of ``x``, and scales ``[..., 1]``."""
        largest = x.abs().amax(-1, keepdim=True)
        # By a tensor: on a GPU torch multiplies by the reciprocal of a Python number.
        scale = largest / torch.full_like(largest, self.half)
        scale = scale.masked_fill(scale == 0, torch.finfo(x.dtype).eps)
        return nearest_code(x / scale, self._args), scale


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


def is_fixed(rounding: ActivationRounding) -> bool:
    """Whether the scale is known before there is anything to round."""
    return rounding.args.dynamic is False


def is_fixed_int8(rounding: ActivationRounding) -> bool:
    """Whether codes are what integer kernels multiply, with one scale for all."""
    args = rounding.args
    return is_fixed(rounding) and args.type == "int" and args.num_bits == 8 and args.symmetric is True


def rounder(
    rounding: ActivationRounding, dtype: torch.dtype, device: torch.device | None = None
) -> Callable[[Tensor], Tensor]:
    """What rounds, in ``dtype`` and on ``device``."""
    if is_fixed(rounding):
        return FixedRounding(rounding, dtype, device)
    total = rounding.global_scale
    return rounding if total is None else replace(rounding, global_scale=total.to(device))


def alike(one: ActivationRounding | None, other: ActivationRounding | None) -> bool:
    """Whether two linears see the same numbers when they are given the same."""
    if one is None or other is None:
        return one is other
    pairs = ((one.scale, other.scale), (one.zero, other.zero), (one.global_scale, other.global_scale))
    return one.args == other.args and all(
        a is b or (a is not None and b is not None and torch.equal(a.float(), b.float())) for a, b in pairs
    )


def described(rounding: ActivationRounding) -> str:
    """For people: to what."""
    args = rounding.args
    kind = f"{args.type}{args.num_bits}"
    if not is_fixed(rounding):
        return kind
    return f"{kind} with a fixed scale{'' if args.symmetric else ' and zero-point'}"


def inputs_told(rounding: ActivationRounding | None) -> str:
    """For people: that inputs are rounded; empty if they are not."""
    return "" if rounding is None else f", inputs rounded to {described(rounding)}"
