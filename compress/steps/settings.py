"""The recipe's `quantize` section, including training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from ...distill.settings import TrainQuantized
from ...quant.settings import auto_scheme, quantize
from ...quant.settings.auto_scheme import scheme_or_auto
from ...quant.settings.methods import AUTO
from ...system.settings.variants import Variants

_TRAIN = "Quantization-aware training, starting from the rounded model; default: none."
_NAMED = "one scheme"


def _trains_what_it_says(step: Any) -> Any:
    others = [each.rounding.method for each in step.overrides if each.rounding is not None]
    if step.train is not None and step.rounding.method != "nested" and "nested" in others:
        raise ValueError(
            "train would train the upper four bits of an override's 8 and nothing else; round all linears by nested"
            " (scheme W4in8), give that override another rounding, or remove train"
        )
    return step


class Quantize(quantize.PostTrainingQuantize):
    """Quantize weights, and activations if the scheme does; one scheme for all linears except overrides."""

    train: TrainQuantized | None = Field(default=None, description=_TRAIN)
    _checked = model_validator(mode="after")(_trains_what_it_says)


class QuantizeAuto(auto_scheme.PostTrainingQuantizeAuto):
    """Quantize with a scheme chosen for each part of the model, so that the loss is least within a target."""

    train: TrainQuantized | None = Field(default=None, description=_TRAIN)
    _checked = model_validator(mode="after")(_trains_what_it_says)


QuantizeSection = Annotated[
    Quantize | QuantizeAuto,
    Variants(
        "scheme",
        {_NAMED: Quantize, AUTO: QuantizeAuto},
        named=lambda scheme: AUTO if scheme == AUTO else _NAMED,
        spelled=scheme_or_auto,
    ),
]
