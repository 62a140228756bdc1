"""The runtime's loss kernels in the place of torch's operators, where training is on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .losses import TORCH, JsdOptions, LossFunctions, Sloped


def functions_for(device: torch.device) -> LossFunctions:
    """What computes the losses on a device."""
    return FUSED if device.type == "cuda" else TORCH


def _divergence(name: str, student: Tensor, teacher: Tensor, temperature: float, options: Any) -> Sloped:
    from ...runtime.kernels.rows.loss_rows import Compared, loss_rows

    beta = options.beta if isinstance(options, JsdOptions) else 0.5
    return loss_rows(name, student, Compared(teacher.to(student.dtype)), temperature, beta)


def _cross_entropy(student: Tensor, targets: Tensor) -> Sloped:
    from ...runtime.kernels.rows.loss_rows import Compared, loss_rows

    return loss_rows("cross_entropy", student, Compared(targets=targets))


def _top_kl(student: Tensor, places: Tensor, kept: Tensor, temperature: float) -> Sloped:
    from ...runtime.kernels.rows.loss_rows import Compared, loss_rows

    compared = Compared(places=places.contiguous(), kept=kept.contiguous())
    return loss_rows("top_kl", student, compared, temperature)


FUSED = LossFunctions(_divergence, _cross_entropy, _top_kl)
