"""What a function-preserving transform is, for the table that names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .options.base import TransformOptions

if TYPE_CHECKING:
    from torch import Tensor

    from ..grid import Grid
    from ..layer_stats import LayerStats
    from .link import Link
    from .rotated_model import ModelRotation, Residual


@dataclass(frozen=True)
class Transform:
    """A transform.

    Attributes:
        options: the pydantic model of its options.
        link: moves a scale where one module feeds others: ``(link, options)``.
        range: chooses the range of a weight's codes: ``(weight, grid, stats, options) -> grid``.
        residual: whether it changes the residual stream of the whole model; weights are edited as they are read.
        rotation: the rotation of a residual stream: ``(residual, hidden size, seed, options)``.
        keeps_zeros: whether zero weights stay zero.
    """

    options: type[TransformOptions] = TransformOptions
    link: Callable[[Link, Any], None] | None = None
    range: Callable[[Tensor, Grid, LayerStats, Any], Grid] | None = None
    residual: bool = False
    rotation: Callable[[Residual, int, int, Any], ModelRotation] | None = None
    keeps_zeros: bool = True
