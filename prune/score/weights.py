"""How much single weights matter."""

from __future__ import annotations

from torch import Tensor


def magnitude(weight: Tensor) -> Tensor:
    """Their size."""
    return weight.float().abs()


def wanda(weight: Tensor, energy: Tensor) -> Tensor:
    """Their size times the norm of what they read (Sun et al., 2023, arXiv:2306.11695, equation 1).

    Args:
        weight: ``[rows, columns]``.
        energy: mean square of each input column; that it is the mean and not the sum changes no order.
    """
    return weight.float().abs() * energy.float().sqrt()
