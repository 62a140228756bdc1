"""The order of "least compressed": what each choice lost on a small model, in one table.

These are an order, and no prediction: other models lose other amounts, and losses do not exactly add up. They are those of
``python -m benchmarks.quantization.format_losses``; docs/benchmarks.md has more methods and models.
"""

from __future__ import annotations

from typing import NamedTuple

UNQUANTIZED = "unquantized"


class FormatLoss(NamedTuple):
    """What a scheme lost.

    Attributes:
        linears: the KL divergence of smelt-6m's predictions from the original's, in nats, with the blocks' linears in it.
        with_head: the same with the output head in it, too.
        reason: why it is there.
    """

    linears: float
    with_head: float
    reason: str

    def of(self, *, head: bool) -> float:
        """With or without the head."""
        return self.with_head if head else self.linears


SCHEME_LOSS: dict[str, FormatLoss] = {
    UNQUANTIZED: FormatLoss(0.0, 0.0, "the original"),
    "W8A16": FormatLoss(0.0005, 0.0006, "256 levels in groups, inputs as they are"),
    "W8A8": FormatLoss(0.0009, 0.0011, "the same for inputs, which may have outliers"),
    "FP8_DYNAMIC": FormatLoss(0.0017, 0.0025, "3 bits of mantissa for weights and inputs"),
    "W4A16": FormatLoss(0.0061, 0.0110, "16 levels in groups of 128"),
    "NVFP4": FormatLoss(0.0204, 0.0331, "16 levels for inputs, too"),
    "W3A16": FormatLoss(0.0245, 0.0439, "8 levels"),
    "W2A16": FormatLoss(0.1540, 0.2597, "4 levels: train afterwards"),
}
# Keys and values: codes of int8 and fp8 with a scale per layer, of int4 with one per token and head.
CACHE_LOSS: dict[str, float] = {"auto": 0.0, "int8": 0.0003, "fp8": 0.0012, "int4": 0.0115}
# One of its six blocks, by influence.
_SHARE, _LOSS = 1 / 6, 0.1484


def block_loss(share: float) -> float:
    """What dropping a share of the blocks lost: in proportion to one of smelt-6m's six."""
    return _LOSS * share / _SHARE
