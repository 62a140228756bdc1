"""The recipe's section about quantization, with training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...distill.settings import TrainQuantized
from ...quant.settings import auto, quantize
from ...quant.settings.auto import scheme_or_auto
from ...quant.settings.methods import AUTO
from ...system.variants import Variants

_TRAIN = "Train the rounded model on, rounding at every step (quantization-aware training); absent for not at all."
_NAMED = "one scheme"


class Quantize(quantize.PostTrainingQuantize):
    """Store weights (and compute with activations) in fewer bits, all in one scheme but for overrides."""

    train: TrainQuantized | None = Field(default=None, description=_TRAIN)


class QuantizeAuto(auto.PostTrainingQuantizeAuto):
    """Store weights in fewer bits, each part of the model in the scheme that loses least within a target."""

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
