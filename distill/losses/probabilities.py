"""Probabilities of logits, and of the most likely of them."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities in float32, or float64 for such logits."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide if temperature == 1 else wide / temperature, -1)


def most_likely(teacher: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the most likely tokens, for :func:`smelt.distill.losses.top_kl.top_kl`."""
    kept, places = log_probabilities(teacher, temperature).topk(count, dim=-1)
    return places, kept
