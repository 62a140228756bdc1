"""Rounding inputs, keys and values by a checkpoint's scheme, with compressed-tensors' arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...quant.activations import ActivationRounding
from ...quant.row_rounding import nearest_code


class FixedRounding:
    """Rounding with a static scale; on a GPU without synchronization.

    Args:
        rounding: the number format and the scale, which is broadcast to the inputs.
        dtype: of the inputs, and the compute dtype.
        device: where.

    Attributes:
        scale: in that dtype.
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
        """The codes, in the dtype of ``x``; less the zero-point, if there is one."""
        found = x / self.scale
        if self._zero is None:
            return nearest_code(found, self._args)
        return nearest_code(found.add_(self._zero), self._args).sub_(self._zero)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scale."""
        return self.codes(x), self.scale


def is_fixed(rounding: ActivationRounding) -> bool:
    """Whether the scale is static."""
    return rounding.args.dynamic is False


def is_fixed_int8(rounding: ActivationRounding) -> bool:
    """Whether codes are int8 with one static scale, as integer kernels multiply them."""
    args = rounding.args
    return is_fixed(rounding) and args.type == "int" and args.num_bits == 8 and args.symmetric is True


def rounder(
    rounding: ActivationRounding, dtype: torch.dtype, device: torch.device | None = None
) -> Callable[[Tensor], Tensor]:
    """The rounding function, for ``dtype`` and ``device``."""
    if is_fixed(rounding):
        return FixedRounding(rounding, dtype, device)
    total = rounding.global_scale
    return rounding if total is None else replace(rounding, global_scale=total.to(device))


def alike(one: ActivationRounding | None, other: ActivationRounding | None) -> bool:
    """Whether two roundings give the same values for the same inputs."""
    if one is None or other is None:
        return one is other
    pairs = ((one.scale, other.scale), (one.zero, other.zero), (one.global_scale, other.global_scale))
    return one.args == other.args and all(
        a is b or (a is not None and b is not None and torch.equal(a.float(), b.float())) for a, b in pairs
    )


def described(rounding: ActivationRounding) -> str:
    """The target format, for messages."""
    args = rounding.args
    kind = f"{args.type}{args.num_bits}"
    if not is_fixed(rounding):
        return kind
    return f"{kind} with a fixed scale{'' if args.symmetric else ' and zero-point'}"


def rounding_explanation(rounding: ActivationRounding | None) -> str:
    """A note that inputs are rounded; empty if they are not."""
    return "" if rounding is None else f", inputs rounded to {described(rounding)}"
