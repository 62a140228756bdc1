"""The losses by name, with the options that recipes check without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ...system.lazy import later


class LossOptions(BaseModel):
    """Base of all losses' options: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class JsdOptions(LossOptions):
    """Options of the generalised Jensen-Shannon divergence."""

    beta: float = Field(
        default=0.5, gt=0, lt=1, description="The teacher's share of the mixture that both are compared with."
    )


@dataclass(frozen=True)
class Loss:
    """A loss by which a student is compared with its teacher.

    Attributes:
        function: from the student's and the teacher's logits ``[positions, vocabulary]``, the temperature and the options
            to values and gradients.
        options: what can be chosen.
    """

    function: Callable[..., Any]
    options: type[LossOptions] = LossOptions


_function = partial(later, __name__.rpartition(".")[0], "losses")

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "forward_kl": Loss(_function("forward_kl")),
        "reverse_kl": Loss(_function("reverse_kl")),
        "jsd": Loss(_function("jsd"), JsdOptions),
        "total_variation": Loss(_function("total_variation")),
    }
)
