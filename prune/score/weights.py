"""Importance scores of single weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightScore:
    """An importance score of single weights.

    Attributes:
        compute: from a weight ``[rows, columns]`` and the mean square of each input column, a score for each element; None if
            the update chooses as it goes.
        reads_inputs: whether it needs that mean square, which takes a calibration text.
        by_row: whether weights are compared within their row, not within the whole matrix.
    """

    compute: Callable[[Tensor, Tensor | None], Tensor] | None
    reads_inputs: bool
    by_row: bool


def magnitude(weight: Tensor, energy: Tensor | None = None) -> Tensor:
    """The magnitude."""
    return weight.float().abs()


def wanda(weight: Tensor, energy: Tensor | None) -> Tensor:
    """The magnitude times the norm of the input (Sun et al., 2023, arXiv:2306.11695, equation 1).

    Args:
        weight: ``[rows, columns]``.
        energy: mean square of each input column; using the mean instead of the sum does not change the order.
    """
    assert energy is not None
    return weight.float().abs() * energy.float().sqrt()


# A new score is a row here, and its name in settings/weights.py.
WEIGHT_SCORES: dict[str, WeightScore] = {
    "magnitude": WeightScore(magnitude, reads_inputs=False, by_row=False),
    "wanda": WeightScore(wanda, reads_inputs=True, by_row=True),
    "obs": WeightScore(None, reads_inputs=True, by_row=True),
}
