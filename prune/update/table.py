"""The updates by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...quant.pattern import Pattern
from .least_squares import refitted
from .sparsegpt import sparsegpt

# A new update is a row here, and its name in settings/.
# Of single weights: from a weight, the mean of x xT and a mask of what to keep, the new weight and notes. With score `obs`
# there is no mask, but a pattern or the share to remove, and the update chooses as it goes.
WEIGHT_UPDATES: dict[str, Callable[[Tensor, Tensor, Pattern | float | Tensor], tuple[Tensor, list[str]]]] = {
    "sparsegpt": sparsegpt
}
# Of units: from the weight that reads them, the mean of x xT and the kept columns, the new columns and notes.
UNIT_UPDATES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, list[str]]]] = {"least_squares": refitted}
