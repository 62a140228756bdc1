"""KL(teacher || student) if only the teacher's top tokens are known."""

from __future__ import annotations

import torch
from torch import Tensor

from .loss_and_gradient import LossAndGradient
from .probabilities import log_probabilities


def top_kl(student: Tensor, places: Tensor, kept: Tensor, temperature: float) -> LossAndGradient:
    """Forward KL against a teacher's stored top tokens, with all other tokens merged into one.

    Never more than :func:`smelt.distill.losses.forward_kl.forward_kl`, and equal to it where the others have no probability.

    Args:
        student: logits ``[positions, vocabulary]``.
        places: ids of the teacher's most likely tokens, ``[positions, k]``.
        kept: their log-probabilities at this temperature.
        temperature: of both distributions.
    """
    ours = log_probabilities(student, temperature)
    kept = kept.to(ours.dtype)
    p = kept.exp()
    least = torch.finfo(ours.dtype).tiny
    p_rest = (1 - p.sum(-1, keepdim=True)).clamp_min(0)
    if places.shape[-1] == student.shape[-1]:
        p_rest = torch.zeros_like(p_rest)  # there are no others, despite rounding
    q = ours.exp()
    q_rest = q.scatter(-1, places, 0.0)
    q_rest_sum = q_rest.sum(-1, keepdim=True).clamp_min(least)
    value = (p * (kept - ours.gather(-1, places))).sum(-1, keepdim=True)
    value = value + p_rest * (p_rest.clamp_min(least).log() - q_rest_sum.log())
    total = p.sum(-1, keepdim=True) + p_rest  # one, up to rounding
    gradient = q.mul_(total).scatter_add_(-1, places, -p).sub_(q_rest.mul_(p_rest / q_rest_sum))
    return value.squeeze(-1) * temperature**2, gradient.mul_(temperature)
