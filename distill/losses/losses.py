"""How far a student's next-token distribution is from its teacher's, and the gradient of that, by hand.

Each loss gets logits of some positions and returns its value and its gradient with respect to the student's logits
together: so a few positions are worked on at a time, and nothing as large as all logits is ever kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .table import LOSSES, JsdOptions, LossOptions

# Values ``[positions]`` and gradients ``[positions, vocabulary]``.
Sloped = tuple[Tensor, Tensor]


def forward_kl(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> Sloped:
    """KL(teacher || student), times the temperature squared (Hinton et al., arXiv:1503.02531).

    Covers all that the teacher finds likely.
    """
    ours, theirs = _log_probabilities(student, temperature), _log_probabilities(teacher, temperature)
    p = theirs.exp()
    value = (p * (theirs - ours)).sum(-1)
    return value * temperature**2, ours.exp_().sub_(p).mul_(temperature)


def reverse_kl(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> Sloped:
    """KL(student || teacher), times the temperature squared (MiniLLM, arXiv:2306.08543).

    Avoids all that the teacher finds unlikely.
    """
    ours, theirs = _log_probabilities(student, temperature), _log_probabilities(teacher, temperature)
    q, apart = ours.exp(), ours - theirs
    value = (q * apart).sum(-1)
    return value * temperature**2, apart.sub_(value.unsqueeze(-1)).mul_(q).mul_(temperature)


def jsd(student: Tensor, teacher: Tensor, temperature: float, options: JsdOptions) -> Sloped:
    """The generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649), times the temperature squared.

    With m = beta p + (1 - beta) q it is beta KL(p || m) + (1 - beta) KL(q || m), p being the teacher's probabilities.
    """
    beta = options.beta
    ours, theirs = _log_probabilities(student, temperature), _log_probabilities(teacher, temperature)
    p, q = theirs.exp(), ours.exp()
    mixed = torch.logaddexp(theirs + _log(beta), ours + _log(1 - beta))
    ours -= mixed
    value = beta * (p * (theirs - mixed)).sum(-1) + (1 - beta) * (q * ours).sum(-1)
    mean = (q * ours).sum(-1, keepdim=True)
    return value * temperature**2, ours.sub_(mean).mul_(q).mul_((1 - beta) * temperature)


def total_variation(student: Tensor, teacher: Tensor, temperature: float, _options: LossOptions) -> Sloped:
    """Half the sum of absolute differences of probabilities, times the temperature squared."""
    q, p = _log_probabilities(student, temperature).exp_(), _log_probabilities(teacher, temperature).exp_()
    value = (q - p).abs().sum(-1) / 2
    sign = torch.sign(q - p)
    mean = (q * sign).sum(-1, keepdim=True)
    return value * temperature**2, sign.sub_(mean).mul_(q).mul_(temperature / 2)


def cross_entropy(student: Tensor, targets: Tensor) -> Sloped:
    """The next token's negative log-likelihood; none where ``targets [positions]`` is negative."""
    ours = _log_probabilities(student, 1.0)
    known = targets >= 0
    places = targets.clamp_min(0).unsqueeze(-1)
    value = -ours.gather(-1, places).squeeze(-1) * known
    slope = ours.exp_()
    slope.scatter_add_(-1, places, torch.full_like(slope[:, :1], -1.0))
    return value, slope.mul_(known.unsqueeze(-1))


def top_kl(student: Tensor, places: Tensor, kept: Tensor, temperature: float) -> Sloped:
    """Forward KL against what is stored of a teacher: its most likely tokens, all others being one.

    Never more than :func:`forward_kl`, and equal to it where the others have no probability.

    Args:
        student: logits ``[positions, vocabulary]``.
        places: ids of the teacher's most likely tokens, ``[positions, k]``.
        kept: their log-probabilities at this temperature.
        temperature: of both distributions.
    """
    ours = _log_probabilities(student, temperature)
    kept = kept.to(ours.dtype)
    p = kept.exp()
    least = torch.finfo(ours.dtype).tiny
    p_rest = (1 - p.sum(-1, keepdim=True)).clamp_min(0)
    if places.shape[-1] == student.shape[-1]:
        p_rest = torch.zeros_like(p_rest)  # there are no others, whatever rounding has lost
    q = ours.exp()
    q_rest = q.scatter(-1, places, 0.0)
    q_rest_sum = q_rest.sum(-1, keepdim=True).clamp_min(least)
    value = (p * (kept - ours.gather(-1, places))).sum(-1, keepdim=True)
    value = value + p_rest * (p_rest.clamp_min(least).log() - q_rest_sum.log())
    total = p.sum(-1, keepdim=True) + p_rest  # one, but for what rounding has lost
    slope = q.mul_(total).scatter_add_(-1, places, -p).sub_(q_rest.mul_(p_rest / q_rest_sum))
    return value.squeeze(-1) * temperature**2, slope.mul_(temperature)


def most_likely(teacher: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the most likely tokens, for :func:`top_kl`."""
    kept, places = _log_probabilities(teacher, temperature).topk(count, dim=-1)
    return places, kept


@dataclass(frozen=True)
class LossFunctions:
    """What computes the losses: torch's operators, or kernels that do the same.

    Attributes:
        divergence: from a name of :data:`LOSSES`, both logits, the temperature and the loss's options.
        cross_entropy: as :func:`cross_entropy`.
        top_kl: as :func:`top_kl`.
    """

    divergence: Callable[[str, Tensor, Tensor, float, Any], Sloped]
    cross_entropy: Callable[[Tensor, Tensor], Sloped] = cross_entropy
    top_kl: Callable[[Tensor, Tensor, Tensor, float], Sloped] = top_kl


def _by_torch(name: str, student: Tensor, teacher: Tensor, temperature: float, options: Any) -> Sloped:
    return LOSSES[name].function(student, teacher, temperature, options)


TORCH = LossFunctions(_by_torch)


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide if temperature == 1 else wide / temperature, -1)


def _log(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float64).log())
