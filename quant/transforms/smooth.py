"""SmoothQuant: inputs with outliers lend some of their range to the weights (Xiao et al., 2023, arXiv:2211.10438)."""

from __future__ import annotations

from .link import Link
from .options.smooth import SmoothOptions

_LEAST = 1e-5


def smooth(link: Link, options: SmoothOptions) -> None:
    """Divide each input channel by ``max|x|^a / max|w|^(1-a)``, and multiply the weights' columns by it."""
    if not link.seen():
        return
    inputs, weights = link.input_peaks(), link.weight_peaks()
    factors = inputs.clamp_min(_LEAST) ** options.strength / weights.clamp_min(_LEAST) ** (1 - options.strength)
    factors[(inputs == 0) | (weights == 0)] = 1.0
    link.move(factors)
