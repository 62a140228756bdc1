"""How every linear begins: the rows of a program, and the part of a launch that does not depend on how weights are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import Launch
from ..base.workspace import Workspace, parts_allowed
from ..tiles.tile import Tile
from .routing import Routing


class Weight(Protocol):
    """What every prepared weight has."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...


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


def product(
    x: Tensor,
    weight: Weight,
    tile: Tile,
    out: Tensor,
    space: Workspace,
    *,
    filled: int,
    steps: int,
    residual: Tensor | None = None,
) -> Product:
    """One product of rows that all read the same weight.

    Args:
        x: the inputs.
        weight: the weight.
        tile: how to cut it up.
        out: where to.
        space: memory for the sums of programs that share a tile.
        filled: outputs with the padding of the last tile.
        steps: iterations over the columns.
        residual: added, of the output's shape.

    Raises:
        ValueError: the inputs do not fit the weight.
    """
    rows = x.shape[0]
    return _product(x, weight, tile, out, space, filled, steps, residual, rows, -(-rows // tile.rows))


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
    """As :func:`product`, for kernels that may send each block of rows to the weight of its expert.

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
    if routing is None:
        found = product(x, weight, tile, out, space, filled=filled, steps=steps, residual=residual)
    else:
        blocks = routing.block_expert.shape[0]
        found = _product(x, weight, tile, out, space, filled, steps, residual, routing.total, blocks)
    found.arguments.update(
        block_expert=None if routing is None else routing.block_expert,
        slots=None if routing is None else routing.slots,
        shares=None if routing is None else routing.shares,
    )
    found.constants.update(GROUPED=routing is not None, PER_TOKEN=1 if routing is None else routing.per_token)
    return found


def _product(
    x: Tensor,
    weight: Weight,
    tile: Tile,
    out: Tensor,
    space: Workspace,
    filled: int,
    steps: int,
    residual: Tensor | None,
    rows: int,
    row_tiles: int,
) -> Product:
    if x.shape[1] != weight.columns or x.stride(1) != 1:
        raise ValueError(
            f"inputs are {list(x.shape)} for a weight of {weight.columns} columns; they must be as wide, and contiguous in a row"
        )
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
    }
    constants = {"BN": tile.outputs, "BM": tile.rows, "PARTED": split > 1, "STAGES": tile.stages}
    return Product(tile, tiles, split, arguments, constants)


@triton.jit
def rows_of(slots, place, M, GROUPED: tl.constexpr, PER_TOKEN: tl.constexpr):
    """A program's slots, which of them are real, and the rows of inputs that they read."""
    if GROUPED:
        slot = tl.load(slots + place)
        return slot, slot < M, slot // PER_TOKEN
    else:
        return place, place < M, place
