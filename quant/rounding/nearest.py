"""Round to nearest: the baseline that every other method must beat."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from ..grid import Grid
from ..layer_stats import LayerStats
from ..scale_search import fit_scales
from ..stored.quantized_weight import QuantizedWeight
from .options.base import RoundingOptions
from .options.nearest import NearestOptions


def nearest(
    weight: Tensor,
    args: QuantizationArgs,
    stats: LayerStats | None = None,
    options: RoundingOptions | None = None,
    grid: Grid | None = None,
) -> QuantizedWeight:
    """Round every weight to the closest value on a grid: that of its group's extremes, or a searched one.

    Args:
        weight: ``[rows, columns]``; in the dtype that scales are stored in, unless ``grid`` is given.
        args: the number format.
        stats: the layer's inputs, for ``scale_search``; without them all columns have equal weight.
        options: see :class:`NearestOptions`; those of other methods have no effect.
        grid: the grid to start from instead of the min-max grid.
    """
    grid = grid or Grid.fit(weight, args)
    if isinstance(options, NearestOptions) and options.scale_search:
        rows = weight.new_ones(1, weight.shape[1]) if stats is None or stats.tokens == 0 else stats.rows
        grid = fit_scales(weight, grid, rows.float().square().mean(0))
    return QuantizedWeight(grid.round(weight.float()), grid)
