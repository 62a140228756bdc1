"""A weight after rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..grid import Grid
from ..scheme import Scheme
from .compressed_tensors import pack


@dataclass(frozen=True)
class QuantizedWeight:
    """Values on a grid, with the method's notes for the report.

    Attributes:
        values: float32 ``[rows, columns]``, every element exactly a code times its step.
        grid: the scales behind ``values``.
        notes: sentences for the report, such as a fallback that was taken.
    """

    values: Tensor
    grid: Grid
    notes: list[str] = field(default_factory=list)

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """The part for some of the rows, of weights that were quantized stacked."""
        grid = self.grid
        part = Grid(
            grid.args,
            grid.scale[start:stop],
            grid.step[start:stop],
            None if grid.zero is None else grid.zero[start:stop],
            grid.width,
            grid.global_scale,
        )
        return QuantizedWeight(self.values[start:stop], part, self.notes)

    def stored(self, scheme: Scheme) -> dict[str, Tensor]:
        """The tensors that compressed-tensors stores for this weight, by local name."""
        return pack(self.values, self.grid, scheme)
