"""The recipe's section about quantization, with training."""

from __future__ import annotations

from pydantic import Field

from ...distill.settings import TrainQuantized
from ...quant.settings import quantize


class Quantize(quantize.Quantize):
    """Store weights (and compute with activations) in fewer bits."""

    train: TrainQuantized | None = Field(
        default=None,
        description="Train the rounded model on, rounding at every step (quantization-aware training); absent for not at all.",
    )
