"""KL(teacher || student), the loss of Hinton et al. (arXiv:1503.02531)."""

from __future__ import annotations

from torch import Tensor

from .loss_and_gradient import LossAndGradient
from .options.base import LossOptions
from .probabilities import log_probabilities


def forward_kl(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> LossAndGradient:
    """KL(teacher || student), times the temperature squared (Hinton et al., arXiv:1503.02531).

    Mode-covering: the student covers all that the teacher finds likely.
    """
    ours, theirs = log_probabilities(student, temperature), log_probabilities(teacher, temperature)
    p = theirs.exp()
    value = (p * (theirs - ours)).sum(-1)
    return value * temperature**2, ours.exp_().sub_(p).mul_(temperature)
