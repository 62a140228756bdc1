"""Loss functions of a device: torch operators, or equivalent kernels.

Each function takes logits of some positions and returns the loss and its gradient with respect to the student's logits
together, so that positions can be processed in chunks and nothing as large as all logits is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import fused
from .cross_entropy import cross_entropy
from .loss_and_gradient import LossAndGradient
from .table import LOSSES


@dataclass(frozen=True)
class LossFunctions:
    """Functions that compute the losses.

    Attributes:
        divergence: takes a name of :data:`LOSSES`, both logits, the temperature and the loss's options.
        cross_entropy: as :func:`smelt.distill.losses.cross_entropy.cross_entropy`.
        of_top: takes a name of :data:`LOSSES`, the student's logits, ids and log-probabilities of the teacher's top tokens, and
            the temperature.
    """

    divergence: Callable[[str, Tensor, Tensor, float, Any], LossAndGradient]
    cross_entropy: Callable[[Tensor, Tensor], LossAndGradient]
    of_top: Callable[[str, Tensor, Tensor, Tensor, float], LossAndGradient]


def _by_torch(name: str, student: Tensor, teacher: Tensor, temperature: float, options: Any) -> LossAndGradient:
    return LOSSES[name].by_torch(student, teacher, temperature, options)


def _on_gpu(name: str, student: Tensor, teacher: Tensor, temperature: float, options: Any) -> LossAndGradient:
    return LOSSES[name].on_gpu(student, teacher, temperature, options)


def _of_top(
    name: str, student: Tensor, places: Tensor, kept: Tensor, temperature: float, *, gpu: bool = False
) -> LossAndGradient:
    return LOSSES[name].of_top(student, places, kept, temperature, gpu=gpu)


TORCH = LossFunctions(_by_torch, cross_entropy, _of_top)
FUSED = LossFunctions(_on_gpu, fused.cross_entropy, partial(_of_top, gpu=True))


def functions_for(device: torch.device) -> LossFunctions:
    """The loss functions of a device."""
    return FUSED if device.type == "cuda" else TORCH
