"""The generalised Jensen-Shannon divergence, the loss of GKD (arXiv:2306.13649)."""

from __future__ import annotations

import torch
from torch import Tensor

from .loss_and_gradient import LossAndGradient
from .options.jsd import JsdOptions
from .probabilities import log_probabilities


def jsd(student: Tensor, teacher: Tensor, temperature: float, options: JsdOptions) -> LossAndGradient:
    """The generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649), times the temperature squared.

    With m = beta p + (1 - beta) q it is beta KL(p || m) + (1 - beta) KL(q || m), p being the teacher's probabilities.
    """
    beta = options.beta
    ours, theirs = log_probabilities(student, temperature), log_probabilities(teacher, temperature)
    p, q = theirs.exp(), ours.exp()
    mixed = torch.logaddexp(theirs + _log(beta), ours + _log(1 - beta))
    ours -= mixed
    value = beta * (p * (theirs - mixed)).sum(-1) + (1 - beta) * (q * ours).sum(-1)
    mean = (q * ours).sum(-1, keepdim=True)
    return value * temperature**2, ours.sub_(mean).mul_(q).mul_((1 - beta) * temperature)


def _log(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float64).log())
