"""Loss functions of a device: torch operators, or equivalent kernels.

Each function takes logits of some positions and returns the loss and its gradient with respect to the student's logits
together, so that positions can be processed in chunks and nothing as large as all logits is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...system.lazy import later
from .cross_entropy import cross_entropy
from .loss_and_gradient import LossAndGradient
from .options.base import LossOptions
from .table import LOSSES

_cross_entropy_kernel = later(__name__.rpartition(".")[0], "fused", "cross_entropy")


@dataclass(frozen=True)
class LossFunctions:
    """The losses, computed by torch's operators or by the runtime's kernels.

    Attributes:
        by_kernels: whether kernels compute the losses that have one.
    """

    by_kernels: bool

    def divergence(
        self, name: str, student: Tensor, teacher: Tensor, temperature: float, options: LossOptions
    ) -> LossAndGradient:
        """A loss of :data:`LOSSES`, from the logits of both."""
        loss = LOSSES[name]
        function = loss.kernel if self.by_kernels and loss.kernel is not None else loss.function
        return function(student, teacher, temperature, options)

    def of_top(self, name: str, student: Tensor, places: Tensor, kept: Tensor, temperature: float) -> LossAndGradient:
        """The same if ids and log-probabilities of the teacher's top tokens are all that is known."""
        loss = LOSSES[name]
        function = loss.top_kernel if self.by_kernels and loss.top_kernel is not None else loss.top
        assert function is not None
        return function(student, places, kept, temperature)

    def cross_entropy(self, student: Tensor, targets: Tensor) -> LossAndGradient:
        """As :func:`smelt.distill.losses.cross_entropy.cross_entropy`."""
        return (_cross_entropy_kernel if self.by_kernels else cross_entropy)(student, targets)


TORCH, FUSED = LossFunctions(by_kernels=False), LossFunctions(by_kernels=True)


def functions_for(device: torch.device) -> LossFunctions:
    """The loss functions of a device."""
    return FUSED if device.type == "cuda" else TORCH
