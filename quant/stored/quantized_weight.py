"""A weight after rounding, and its way to and from the tensors that a checkpoint stores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from compressed_tensors.compressors import BaseCompressor
from torch import Tensor

from ..grid import Grid
from ..scheme import Scheme


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
        state: dict[str, Tensor | None] = {"weight": self.values, "weight_scale": self.grid.scale}
        if self.grid.global_scale is not None:
            state["weight_global_scale"] = self.grid.global_scale
        if self.grid.zero is not None:
            state["weight_zero_point"] = self.grid.zero.to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        packed = compressor.compress(state, scheme.config_group(["Linear"]))
        return {name: tensor.contiguous() for name, tensor in packed.items() if tensor is not None}


def join_rows(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The stored tensors of a weight, joined from those of consecutive parts of its rows.

    Args:
        parts: as :meth:`QuantizedWeight.stored` gives them, each of a multiple of 128 rows except the last.
    """
    joined: dict[str, Tensor] = {}
    for name, first in parts[0].items():
        each = [part[name] for part in parts]
        if name == "weight_global_scale":
            joined[name] = first
        elif name == "weight_shape":
            joined[name] = torch.stack([torch.stack(each)[:, 0].sum(), first[1]]).to(first.dtype)
        else:
            joined[name] = torch.cat(each)
    return joined


def restore(stored: dict[str, Tensor], scheme: Scheme) -> Tensor:
    """The dense weight that compressed-tensors restores from stored tensors (and transformers computes with)."""
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    weight = compressor.decompress(
        {k: t for k, t in stored.items() if k.startswith("weight")}, scheme.config_group(["Linear"])
    )["weight"]
    assert weight is not None
    return weight
