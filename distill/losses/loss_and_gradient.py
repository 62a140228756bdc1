"""A loss and its gradient, computed together; by autograd if there is no hand-written gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Values ``[positions]`` and gradients ``[positions, vocabulary]``.
LossAndGradient = tuple[Tensor, Tensor]


def by_autograd(values: Callable[[Tensor], Tensor], student: Tensor) -> LossAndGradient:
    """Values of a loss, and their gradients with respect to the student's logits.

    Args:
        values: from logits ``[positions, vocabulary]`` to values ``[positions]``.
        student: the logits; 16-bit ones are widened first, so that gradients are float32.
    """
    with torch.enable_grad():
        leaf = (student if student.dtype == torch.float64 else student.float()).detach().requires_grad_()
        found = values(leaf)
        (gradient,) = torch.autograd.grad(found.sum(), leaf)
    return found.detach(), gradient
