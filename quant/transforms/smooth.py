"""SmoothQuant: inputs with outliers lend some of their range to the weights (Xiao et al., 2023, arXiv:2211.10438)."""

from __future__ import annotations

from pydantic import Field

from .link import Link
from .transform import TransformOptions

_LEAST = 1e-5


class SmoothOptions(TransformOptions):
    """Options of SmoothQuant."""

    strength: float = Field(
        default=0.5, ge=0, le=1, description="How much of the inputs' range moves to the weights; the paper's alpha."
    )


def smooth(link: Link, options: SmoothOptions) -> None:
    """Divide each input channel by ``max|x|^a / max|w|^(1-a)``, and multiply the weights' columns by it."""
    if not link.seen():
        return
    inputs, weights = link.input_peaks(), link.weight_peaks()
    factors = inputs.clamp_min(_LEAST) ** options.strength / weights.clamp_min(_LEAST) ** (1 - options.strength)
    factors[(inputs == 0) | (weights == 0)] = 1.0
    link.move(factors)
