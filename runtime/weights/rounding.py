"""Rounding inputs, keys and values as a checkpoint says, by compressed-tensors' arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...quant.activations import ActivationRounding
from ...quant.row_rounding import nearest_code


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


def rounding_explanation(rounding: ActivationRounding | None) -> str:
    """For people: that inputs are rounded; empty if they are not."""
    return "" if rounding is None else f", inputs rounded to {described(rounding)}"
