"""KL(student || teacher), the loss of MiniLLM (arXiv:2306.08543)."""

from __future__ import annotations

from torch import Tensor

from .loss_and_gradient import LossAndGradient
from .options.base import LossOptions
from .probabilities import log_probabilities


def reverse_kl(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> LossAndGradient:
    """KL(student || teacher), times the temperature squared (MiniLLM, arXiv:2306.08543).

    Mode-seeking: the student avoids all that the teacher finds unlikely.
    """
    ours, theirs = log_probabilities(student, temperature), log_probabilities(teacher, temperature)
    q, apart = ours.exp(), ours - theirs
    value = (q * apart).sum(-1)
    return value * temperature**2, apart.sub_(value.unsqueeze(-1)).mul_(q).mul_(temperature)
