"""The effect of quantizing a linear on its outputs, and of that on a model's predictions.

A small change ``d`` of a linear's outputs moves a model's predictions by the divergence
``KL(before || after) = 1/2 E[(g . d)^2]``, where ``g`` is the gradient, with respect to those outputs, of the
log-likelihood of a token drawn from the model's own predictions (the Fisher information of the outputs).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .activations import ActivationRounding


@dataclass(frozen=True)
class OutputChange:
    """How a linear's outputs change when it is stored in fewer bits.

    Attributes:
        weight: the quantized weight minus the original, ``[rows, columns]``.
        rounding: how its inputs are rounded, if they are.
    """

    weight: Tensor
    rounding: ActivationRounding | None = None

    def __call__(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """The change for ``inputs [tokens, columns]`` of the linear with ``weight [rows, columns]``."""
        if self.rounding is None:
            return inputs @ self.weight.T
        rounded = self.rounding(inputs)
        return rounded @ self.weight.T + (rounded - inputs) @ weight.T


def squared_effect(gradient: Tensor, change: Tensor) -> float:
    """The sum over tokens of ``(g . d)^2``.

    Args:
        gradient: of the log-likelihood with respect to a linear's outputs, ``[tokens, rows]``.
        change: of those outputs, ``[tokens, rows]``.
    """
    return float((gradient.float() * change.float()).sum(-1).double().square().sum())


def divergence(before: Tensor, after: Tensor) -> float:
    """The sum over positions of ``KL(before || after)`` of two models' logits ``[..., vocabulary]``, in nats."""
    first, second = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return float((first.exp() * (first - second)).sum())
