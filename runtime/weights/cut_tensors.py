"""The tensors of a part of a linear, as if they were stored so."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...models.checkpoint.weights import CheckpointWeights
from .layout import Cut, Layout, Ranges

_PLACES = "g_idx"


class Stored(Protocol):
    """A checkpoint's tensors."""

    weights: CheckpointWeights

    def has(self, name: str) -> bool: ...
    def tensor(self, name: str) -> Tensor: ...


class CutTensors:
    """Reads only what the part needs.

    Args:
        stored: the whole tensors.
        module: the linear's name.
        layout: of its tensors.
        cut: the part; it begins and ends where the layout's units do.
    """

    def __init__(self, stored: Stored, module: str, layout: Layout, cut: Cut) -> None:
        self._stored, self._prefix, self._layout, self._cut = stored, f"{module}.", layout, cut

    def has(self, name: str) -> bool:
        """Whether a tensor is stored."""
        return self._stored.has(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor's part, or one that is the same for all parts."""
        local = name.removeprefix(self._prefix)
        rows, columns = self._cut.rows, self._cut.columns
        if local == "weight_shape":
            whole = self._stored.tensor(name)
            height = self._layout.rows if rows is None else sum(map(len, rows))
            width = self._layout.columns if columns is None else len(columns)
            return torch.tensor([height, width], dtype=whole.dtype)
        part = self._layout.parts.get(local)
        if part is None:
            return self._stored.tensor(name)
        places: dict[int, Ranges] = {}
        for axis, wanted in ((part.rows, rows), (part.columns, None if columns is None else [columns])):
            if axis is not None and wanted is not None:
                places[axis.dim] = [axis.place(each) for each in wanted]
        if not places:
            return self._stored.tensor(name)
        found = self._stored.weights.load_part(name, places.get(0), places.get(1))
        if local == _PLACES and columns is not None:
            # Groups are counted from the part's first one.
            found = found - found.min()
        return found


def aligned(unit: int | None, total: int, ranges: Ranges) -> bool:
    """Whether a part begins and ends where units do.

    Args:
        unit: outputs or inputs that can only be read together; None if all.
        total: how many there are.
        ranges: the part.
    """
    return unit is not None and all(
        each.start % unit == 0 and (each.stop % unit == 0 or each.stop == total) for each in ranges
    )
