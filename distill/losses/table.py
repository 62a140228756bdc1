"""The losses by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...system.lazy import later
from .options.base import LossOptions
from .options.jsd import JsdOptions

if TYPE_CHECKING:
    from .loss_and_gradient import LossAndGradient


@dataclass(frozen=True)
class Loss:
    """A loss between a student and its teacher, computed a few positions at a time.

    Its functions return values ``[positions]`` and their gradients with respect to the student's logits.

    Attributes:
        function: of the student's and the teacher's logits ``[positions, vocabulary]``, the temperature and the options, by
            torch's operators; one without a hand-written gradient is decorated with :func:`.loss_and_gradient.by_autograd`.
        options: its options.
        kernel: the same on a GPU, in one kernel.
        top: if only the teacher's top tokens are known: of ``(student, places, kept, temperature)``, as
            :func:`.top_kl.top_kl`; None for losses that need all of its logits.
        top_kernel: the same on a GPU.
    """

    function: Callable[..., LossAndGradient]
    options: type[LossOptions] = LossOptions
    kernel: Callable[..., LossAndGradient] | None = None
    top: Callable[..., LossAndGradient] | None = None
    top_kernel: Callable[..., LossAndGradient] | None = None


_function = partial(later, __name__.rpartition(".")[0])
_kernel = partial(partial, _function("fused", "divergence"))

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "forward_kl": Loss(
            _function("forward_kl"),
            kernel=_kernel("forward_kl"),
            top=_function("top_kl"),
            top_kernel=_function("fused", "top_kl"),
        ),
        "reverse_kl": Loss(_function("reverse_kl"), kernel=_kernel("reverse_kl")),
        "jsd": Loss(_function("jsd"), JsdOptions, kernel=_kernel("jsd")),
        "total_variation": Loss(_function("total_variation"), kernel=_kernel("total_variation")),
    }
)
