"""The type of the losses in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .options.base import LossOptions

if TYPE_CHECKING:
    from torch import Tensor

    from .loss_and_gradient import LossAndGradient


@dataclass(frozen=True)
class Loss:
    """A loss between a student and its teacher, computed a few positions at a time.

    Its functions take the student's and the teacher's logits ``[positions, vocabulary]``, the temperature and the options.

    Attributes:
        values: returns values ``[positions]``, by operations that torch can differentiate.
        options: its options.
        gradient: returns values and gradients together, hand-written, in less memory and time than autograd.
        kernel: the same on a GPU, in one kernel.
        top: values and gradients if only the teacher's top tokens are known: ``(student, places, kept, temperature)``, as
            :func:`.top_kl.top_kl`; None for losses that need all of its logits.
        top_kernel: the same on a GPU.
    """

    values: Callable[..., Tensor]
    options: type[LossOptions] = LossOptions
    gradient: Callable[..., LossAndGradient] | None = None
    kernel: Callable[..., LossAndGradient] | None = None
    top: Callable[..., LossAndGradient] | None = None
    top_kernel: Callable[..., LossAndGradient] | None = None

    def by_torch(self, student: Tensor, teacher: Tensor, temperature: float, options: Any) -> LossAndGradient:
        """Values and gradients by torch operators: hand-written, or by autograd."""
        if self.gradient is not None:
            return self.gradient(student, teacher, temperature, options)
        from .loss_and_gradient import by_autograd

        return by_autograd(lambda logits: self.values(logits, teacher, temperature, options), student)

    def on_gpu(self, student: Tensor, teacher: Tensor, temperature: float, options: Any) -> LossAndGradient:
        """The same by its kernel, if it has one."""
        return (self.kernel or self.by_torch)(student, teacher, temperature, options)

    def of_top(
        self, student: Tensor, places: Tensor, kept: Tensor, temperature: float, *, gpu: bool
    ) -> LossAndGradient:
        """Values and gradients from the teacher's top tokens; see ``top``."""
        assert self.top is not None
        function = self.top_kernel or self.top if gpu else self.top
        return function(student, places, kept, temperature)
