"""Losses and their gradients by the runtime's kernels, for training on a GPU."""

from __future__ import annotations

from torch import Tensor

from ...runtime.kernels.rows.loss_rows import Compared, loss_rows
from .loss_and_gradient import LossAndGradient
from .options.base import LossOptions
from .options.jsd import JsdOptions


def divergence(
    name: str, student: Tensor, teacher: Tensor, temperature: float, options: LossOptions
) -> LossAndGradient:
    """As the function of the table's loss of that name."""
    beta = options.beta if isinstance(options, JsdOptions) else 0.5
    return loss_rows(name, student, Compared(teacher.to(student.dtype)), temperature, beta)


def cross_entropy(student: Tensor, targets: Tensor) -> LossAndGradient:
    """As :func:`smelt.distill.losses.cross_entropy.cross_entropy`."""
    return loss_rows("cross_entropy", student, Compared(targets=targets))


def top_kl(student: Tensor, places: Tensor, kept: Tensor, temperature: float) -> LossAndGradient:
    """As :func:`smelt.distill.losses.top_kl.top_kl`."""
    compared = Compared(places=places.contiguous(), kept=kept.contiguous())
    return loss_rows("top_kl", student, compared, temperature)
