"""The recipe's `quantize` section, including training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...distill.settings import TrainQuantized
from ...quant.settings import auto_scheme, quantize
from ...quant.settings.auto_scheme import scheme_or_auto
from ...quant.settings.methods import AUTO
from ...system.settings.variants import Variants

_TRAIN = "Quantization-aware training, starting from the rounded model; default: none."
_NAMED = "one scheme"


class Quantize(quantize.PostTrainingQuantize):
    """Quantize weights, and activations if the scheme does; one scheme for all linears except overrides."""

    train: TrainQuantized | None = Field(default=None, description=_TRAIN)


class QuantizeAuto(auto_scheme.PostTrainingQuantizeAuto):
    """Quantize with a scheme chosen for each part of the model, so that the loss is least within a target."""

    train: TrainQuantized | None = Field(default=None, description=_TRAIN)


QuantizeSection = Annotated[
    Quantize | QuantizeAuto,
    Variants(
        "scheme",
        {_NAMED: Quantize, AUTO: QuantizeAuto},
        named=lambda scheme: AUTO if scheme == AUTO else _NAMED,
        spelled=scheme_or_auto,
    ),
]
