"""The kernel fusions; each can be switched off to measure its benefit."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Fusions:
    """All on by default.

    Attributes:
        norm: adding to the residual, and norms, in one launch.
        rounding: inputs of 8-bit linears are rounded in the preceding norm.
        rotation: query and key norms, RoPE, and the rounded write to the cache.
        storing: the same, in the attention launch of single tokens.
        activation: the gate's product, or the activation, in the preceding linear's epilogue.
        residual: the residual addition in the preceding linear's epilogue.
        attention: flash attention, instead of separate scores, softmax and products.
        sampling: sampling on the device, in two launches.
        graphs: steps are replayed as one CUDA graph.
        overlap: from sm_90 on, launches overlap with their predecessors (programmatic dependent launch).
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
        """A copy with some switched off."""
        return replace(self, **dict.fromkeys(names, False))

    @classmethod
    def names(cls) -> list[str]:
        """The names of all fusions."""
        return [field.name for field in fields(cls)]
