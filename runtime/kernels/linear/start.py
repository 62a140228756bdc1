"""How every linear begins: the rows of a program, and the part of a launch that does not depend on how weights are stored."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import Launch
from ..base.workspace import Workspace, parts_allowed
from ..tiles.tile import Tile
from .finish import is_gated
from .packing import ROWS
from .routing import Routing


class Weight:
    """What every prepared weight has: a matrix, or one for each expert.

    Attributes:
        rows, columns: of the matrix.
        bias: one for each row; None if there is none.
        gate: one of :data:`GATES` of :mod:`finish`; a gate's rows and those of its inputs lie 8 by 8.
        experts: how many there are; 0 for a plain matrix.
    """

    rows: int
    columns: int
    bias: Tensor | None
    gate: str
    experts: int

    @property
    def filled(self) -> int:
        """Rows, filled up to whole tiles."""
        return -(-self.rows // ROWS) * ROWS

    @property
    def outputs(self) -> int:
        """Outputs per row of inputs."""
        return self.rows // 2 if is_gated(self.gate) else self.rows

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads, for one expert."""
        return sum(part.nbytes for part in self.tensors().values()) // max(self.experts, 1)

    def copied(self) -> Self:
        """The same in other memory."""
        found = copy(self)
        vars(found).update({name: part.clone() for name, part in self.tensors().items()})
        return found

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        """Matrices of the same kind, as one with experts.

        Raises:
            ValueError: they are not all stored alike, or have biases.
        """
        if any(each.bias is not None for each in weights):
            raise ValueError("experts with biases are not supported")
        if any(each._kind() != weights[0]._kind() for each in weights):
            raise ValueError("experts must all be stored alike")
        found = copy(weights[0])
        for name, part in found.tensors().items():
            # Not every device stacks 8-bit floats.
            stacked = torch.uint8 if part.itemsize == 1 else part.dtype
            whole = torch.stack([getattr(each, name).view(stacked) for each in weights])
            vars(found)[name] = whole.view(part.dtype)
        vars(found)["experts"] = len(weights)
        return found

    def _kind(self) -> dict[str, Any]:
        return {n: (v.shape, v.dtype) if isinstance(v, Tensor) else v for n, v in vars(self).items()}

    def tensors(self) -> dict[str, Tensor]:
        """Its parts, by name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}


def room_for(x: Tensor, weight: Weight, out: Tensor | None, routing: Routing | None) -> Tensor:
    """``out``, or by default ``[rows, outputs]`` in the inputs' dtype; with ``routing`` a row for each of its slots."""
    rows = x.shape[0] if routing is None else routing.total
    return torch.empty(rows, weight.outputs, dtype=x.dtype, device=x.device) if out is None else out


@dataclass(frozen=True)
class Product:
    """A product's programs, and the arguments and constants that every linear kernel takes.

    Attributes:
        tile: how it is cut up.
        tiles: how many tiles there are.
        split: how many programs share a tile's columns.
        arguments: by name.
        constants: by name.
    """

    tile: Tile
    tiles: int
    split: int
    arguments: dict[str, Tensor | int | None]
    constants: dict[str, Any]

    def launch(self, function: Any, arguments: dict[str, Tensor | int | None], constants: dict[str, Any]) -> Launch:
        """The launch of a kernel, with the arguments and constants that only it has."""
        return Launch(
            function,
            {**self.arguments, **arguments},
            {**self.constants, **constants},
            (self.tiles, self.split),
            self.tile.warps,
            self.tile.stages,
        )


def routed_product(
    x: Tensor,
    weight: Weight,
    tile: Tile,
    out: Tensor,
    space: Workspace,
    *,
    filled: int,
    steps: int,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Product:
    """One product, whose blocks of rows may each be sent to the weight of an expert.

    Args:
        x: the inputs.
        weight: the weight, or those of all experts.
        tile: how to cut it up.
        out: where to.
        space: memory for the sums of programs that share a tile.
        filled: outputs with the padding of the last tile.
        steps: iterations over the columns.
        residual: added, of the output's shape.
        routing: which rows go to which expert; None for rows that all read the same weight.

    Raises:
        ValueError: the inputs do not fit the weight.
    """
    if x.shape[1] != weight.columns or x.stride(1) != 1:
        raise ValueError(
            f"inputs are {list(x.shape)} for a weight of {weight.columns} columns; they must be as wide, and contiguous in a row"
        )
    rows = x.shape[0] if routing is None else routing.total
    if filled % tile.outputs:
        raise ValueError(
            f"{filled} outputs do not divide into tiles of {tile.outputs}: the last ones would not be written"
        )
    row_tiles = -(-rows // tile.rows) if routing is None else routing.block_expert.shape[0]
    tiles = row_tiles * (filled // tile.outputs)
    split = parts_allowed(tile.split, steps)
    parts, arrived = space.reserve(split * rows * filled, tiles) if split > 1 else (None, None)
    arguments: dict[str, Tensor | int | None] = {
        "x": x,
        "bias": weight.bias,
        "residual": residual,
        "out": out,
        "parts": parts,
        "arrived": arrived,
        "M": rows,
        "N": weight.rows,
        "K": weight.columns,
        "FILLED": filled,
        "x_stride": x.stride(0),
        "row_tiles": row_tiles,
        "split": split,
        "block_expert": None if routing is None else routing.block_expert,
        "slots": None if routing is None else routing.slots,
        "shares": None if routing is None else routing.shares,
    }
    constants = {
        "BN": tile.outputs,
        "BM": tile.rows,
        "PARTED": split > 1,
        "STAGES": tile.stages,
        "GROUPED": routing is not None,
        "PER_TOKEN": 1 if routing is None else routing.per_token,
    }
    return Product(tile, tiles, split, arguments, constants)


@triton.jit
def rows_of(slots, place, M, GROUPED: tl.constexpr, PER_TOKEN: tl.constexpr):
    """A program's slots, which of them are real, and the rows of inputs that they read."""
    if GROUPED:
        slot = tl.load(slots + place)
        return slot, slot < M, slot // PER_TOKEN
    else:
        return place, place < M, place
