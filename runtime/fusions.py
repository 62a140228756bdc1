"""What is done together in one launch, each of which can be switched off to see what it buys."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Fusions:
    """All on by default.

    Attributes:
        norm: adding to the residual, and norms, in one launch.
        rounding: inputs of 8-bit linears are rounded by the norm before them.
        rotation: norms of queries and keys, rotary positions, and the cache's write with its rounding.
        storing: the same on the way into the attention of single tokens.
        activation: the gate's product, or the activation, at the end of the product before it.
        residual: adding to the residual at the end of the product before it.
        attention: flash attention, instead of scores, softmax and products one after another.
        sampling: tokens are chosen on the device, in two launches.
        graphs: steps are replayed as one CUDA graph.
        overlap: from sm_90 on, a launch begins before the one before it has ended (programmatic dependent launch).
    """

    norm: bool = True
    rounding: bool = True
    rotation: bool = True
    storing: bool = True
    activation: bool = True
    residual: bool = True
    attention: bool = True
    sampling: bool = True
    graphs: bool = True
    overlap: bool = True

    def without(self, *names: str) -> Fusions:
        """The same with some switched off."""
        return replace(self, **dict.fromkeys(names, False))

    @classmethod
    def names(cls) -> list[str]:
        """Of all."""
        return [field.name for field in fields(cls)]
