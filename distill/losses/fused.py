"""Losses and their gradients by the runtime's kernels, for training on a GPU."""

from __future__ import annotations

from torch import Tensor

from .loss_and_gradient import LossAndGradient
from .options.base import LossOptions
from .options.jsd import JsdOptions


def forward_kl(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> LossAndGradient:
    """As :func:`smelt.distill.losses.forward_kl.with_gradient`."""
    return _divergence("forward_kl", student, teacher, temperature)


def reverse_kl(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> LossAndGradient:
    """As :func:`smelt.distill.losses.reverse_kl.with_gradient`."""
    return _divergence("reverse_kl", student, teacher, temperature)


def jsd(student: Tensor, teacher: Tensor, temperature: float, options: JsdOptions) -> LossAndGradient:
    """As :func:`smelt.distill.losses.jsd.with_gradient`."""
    return _divergence("jsd", student, teacher, temperature, options.beta)


def total_variation(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> LossAndGradient:
    """As :func:`smelt.distill.losses.total_variation.with_gradient`."""
    return _divergence("total_variation", student, teacher, temperature)


def cross_entropy(student: Tensor, targets: Tensor) -> LossAndGradient:
    """As :func:`smelt.distill.losses.cross_entropy.cross_entropy`."""
    from ...runtime.kernels.rows.loss_rows import Compared, loss_rows

    return loss_rows("cross_entropy", student, Compared(targets=targets))


def top_kl(student: Tensor, places: Tensor, kept: Tensor, temperature: float) -> LossAndGradient:
    """As :func:`smelt.distill.losses.top_kl.top_kl`."""
    from ...runtime.kernels.rows.loss_rows import Compared, loss_rows

    compared = Compared(places=places.contiguous(), kept=kept.contiguous())
    return loss_rows("top_kl", student, compared, temperature)


def _divergence(kind: str, student: Tensor, teacher: Tensor, temperature: float, beta: float = 0.5) -> LossAndGradient:
    from ...runtime.kernels.rows.loss_rows import Compared, loss_rows

    return loss_rows(kind, student, Compared(teacher.to(student.dtype)), temperature, beta)
