"""Half the sum of absolute differences of probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from .loss_and_gradient import LossAndGradient
from .options.base import LossOptions
from .probabilities import log_probabilities


def total_variation(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> LossAndGradient:
    """Half the sum of absolute differences of probabilities, times the temperature squared."""
    q, p = log_probabilities(student, temperature).exp_(), log_probabilities(teacher, temperature).exp_()
    value = (q - p).abs().sum(-1) / 2
    sign = torch.sign(q - p)
    mean = (q * sign).sum(-1, keepdim=True)
    return value * temperature**2, sign.sub_(mean).mul_(q).mul_(temperature / 2)
