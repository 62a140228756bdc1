"""Round to nearest: the baseline that every other method must beat."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ..grid import Grid
from ..layer_stats import LayerStats
from ..quantized_weight import QuantizedWeight
from .method import RoundingOptions


class NearestOptions(RoundingOptions):
    """Round to nearest has nothing to choose."""


def nearest(
    weight: Tensor,
    args: QuantizationArgs,
    stats: LayerStats | None = None,
    options: RoundingOptions | None = None,
    grid: Grid | None = None,
) -> QuantizedWeight:
    """Round every weight to the closest value on the grid of its group's extremes.

    Args:
        weight: ``[rows, columns]``; in the dtype that scales are stored in, unless ``grid`` is given.
        args: the number format.
        stats, options: not used.
        grid: the grid to use instead.
    """
    grid = grid or Grid.fit(weight, args)
    return QuantizedWeight(grid.round(weight.float()), grid)
