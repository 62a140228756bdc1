"""A loss and its gradient, computed together; by autograd if there is no hand-written gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

# Values ``[positions]`` and gradients ``[positions, vocabulary]``.
LossAndGradient = tuple[Tensor, Tensor]


def by_autograd(values: Callable[..., Tensor]) -> Callable[..., LossAndGradient]:
    """A loss from a function that returns its values alone, by operations that torch can differentiate.

    Args:
        values: of the student's logits, of which 16-bit ones are widened first, so that gradients are float32, and the rest.
    """

    @wraps(values)
    def loss(student: Tensor, *given: Any) -> LossAndGradient:
        with torch.enable_grad():
            leaf = (student if student.dtype == torch.float64 else student.float()).detach().requires_grad_()
            found = values(leaf, *given)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
        return found.detach(), gradient

    return loss
