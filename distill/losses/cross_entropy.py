"""The next token's negative log-likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from .loss_and_gradient import LossAndGradient
from .probabilities import log_probabilities


def cross_entropy(student: Tensor, targets: Tensor) -> LossAndGradient:
    """The next token's negative log-likelihood; zero where ``targets [positions]`` is negative."""
    ours = log_probabilities(student, 1.0)
    known = targets >= 0
    places = targets.clamp_min(0).unsqueeze(-1)
    value = -ours.gather(-1, places).squeeze(-1) * known
    gradient = ours.exp_()
    gradient.scatter_add_(-1, places, torch.full_like(gradient[:, :1], -1.0))
    return value, gradient.mul_(known.unsqueeze(-1))
