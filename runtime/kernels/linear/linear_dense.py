"""Linears of float16 and bfloat16 weights for few rows, or by expert, with a fused epilogue.

The weight keeps its row-major layout, so that :func:`torch.nn.functional.linear` can use the same memory
for many rows. As elsewhere it is the left operand: 8 rows are enough to fill the right one. Rows of
several experts use this kernel for any number of rows: torch's products would synchronize to learn how
many each expert has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import GENERAL, Launch, multiplied_as
from ..base.overlap import launch_dependents, prefetch_rows, wait_for_earlier
from ..base.workspace import Workspace, workspace
from ..tiles.tile import LinearShape, Tile, Tiles
from .case import LinearCase, linear_kernel
from .finish import ONE_TILE, activated, is_gated, store_outputs, sum_of_parts
from .packing import interleaved
from .routing import Routing
from .start import Weight, room_for, routed_product, rows_of

BLOCK = 64  # the fewest columns of an iteration: 128 bytes of each row, what memory is read by


@triton.jit(do_not_specialize=GENERAL)
def _linear_dense(
    x,
    weight,
    bias,
    residual,
    out,
    parts,
    arrived,
    block_expert,
    slots,
    shares,
    M,
    N,
    K,
    FILLED,
    x_stride,
    row_tiles,
    split,
    weight_stride,
    GATE: tl.constexpr,
    GROUPED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STEP: tl.constexpr,
    SLICES: tl.constexpr,
    PARTED: tl.constexpr,
    STAGES: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    part_id = tl.program_id(1)
    # Tiles of rows that share weights run together, so that the weights are read from memory once.
    pm = pid % row_tiles
    pn = pid // row_tiles
    n = pn * BN + tl.arange(0, BN)
    place = pm * BM + tl.arange(0, BM)
    if PDL and not GROUPED:
        # Which weights an expert's program reads, an earlier launch says.
        mine = tl.cdiv(tl.cdiv(K, STEP * SLICES), split) * STEP * SLICES
        end = tl.minimum(part_id * mine + mine, K) * 2 - 1
        prefetch_rows(weight, tl.minimum(n, N - 1), part_id * mine * 2, end, K * 2)
    wait_for_earlier(PDL)
    if GROUPED:
        expert = tl.load(block_expert + pm).to(tl.int64)
        if expert < 0:
            return
        weight += expert * weight_stride
    slot, valid, x_row = rows_of(slots, place, M, GROUPED, PER_TOKEN)
    # Behind the last row it is read again, which needs no mask; nobody stores what comes of it.
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    x_rows = x + x_row.to(tl.int64)[:, None] * x_stride
    steps = tl.cdiv(K, STEP * SLICES)
    each = tl.cdiv(steps, split)
    # With slices each warp has columns of its own, as if it were a program; sums are added up at the end.
    acc = tl.zeros([SLICES, BN, BM] if SLICES > 1 else [BN, BM], tl.float32)
    for step in tl.range(part_id * each, tl.minimum(part_id * each + each, steps), num_stages=STAGES):
        columns = step * STEP + tl.arange(0, STEP)
        if SLICES > 1:
            columns = (step * SLICES + tl.arange(0, SLICES)[:, None, None]) * STEP + tl.arange(0, STEP)[None, None, :]
            weights = tl.load(w_rows[None, :, :] + columns, eviction_policy="evict_first")
            inputs = tl.load(x_rows[None, :, :] + columns, mask=valid[None, :, None], other=0.0)
        elif EVEN:
            weights = tl.load(w_rows + columns[None, :], eviction_policy="evict_first" if BM <= ONE_TILE else "")
            inputs = tl.load(x_rows + columns[None, :], mask=valid[:, None], other=0.0)
        else:
            inside = (columns < K)[None, :]
            weights = tl.load(w_rows + columns[None, :], mask=inside, other=0.0)
            inputs = tl.load(x_rows + columns[None, :], mask=valid[:, None] & inside, other=0.0)
        acc = tl.dot(weights.to(HALF), tl.trans(inputs.to(HALF)), acc)
    launch_dependents(PDL)
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    if PARTED:
        acc, last = sum_of_parts(acc, parts, arrived, pid, part_id, slot, valid, n, M, FILLED, split)
        if not last:
            return
    store_outputs(acc, out, None, bias, residual, shares, pn, slot, valid, N, BN, GATE)


@dataclass(frozen=True)
class DenseWeight(Weight):
    """A matrix of 16-bit floats, or one for each expert.

    Attributes:
        weight: float16 or bfloat16, ``[rows, columns]``, one row after another; with experts ``[experts, rows, columns]``.
        bias: one for each row, in the rows' order; None if there is none.
    """

    rows: int
    columns: int
    weight: Tensor
    bias: Tensor | None
    gate: str
    experts: int = 0


def prepare(weight: Tensor, bias: Tensor | None = None, gate: str = "none") -> DenseWeight:
    """A matrix for :func:`linear_dense`; copied only if it is gated.

    Args:
        weight: float16 or bfloat16, ``[rows, columns]``.
        bias: ``[rows]``.
        gate: ``silu`` or ``gelu_tanh`` if the first half of the rows is a gate for the second; with ``alone_``
            before it (also ``relu`` and ``gelu``), an activation of all rows.

    Raises:
        ValueError: the kernel does not support it.
    """
    rows, columns = weight.shape
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"a weight of {weight.dtype}; the kernel takes 16-bit floats")
    if is_gated(gate):
        order = interleaved(rows).to(weight.device)
        weight, bias = weight[order], None if bias is None else bias[order]
    return DenseWeight(rows, columns, weight.contiguous(), None if bias is None else bias.contiguous(), gate)


def launch(
    x: Tensor,
    weight: DenseWeight,
    tile: Tile,
    out: Tensor,
    space: Workspace,
    *,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Launch:
    """One product, ready to run."""
    if x.dtype != weight.weight.dtype:
        raise ValueError(f"inputs are {x.dtype} for a weight of {weight.weight.dtype}")
    across = -(-weight.rows // tile.outputs)
    if tile.slices > 1 and weight.columns % (tile.step * tile.slices):
        raise ValueError(f"{weight.columns} columns do not divide into {tile.slices} slices of {tile.step}")
    common = routed_product(
        x,
        weight,
        tile,
        out,
        space,
        filled=across * tile.outputs,
        steps=-(-weight.columns // (tile.step * tile.slices)),
        residual=residual,
        routing=routing,
    )
    constants: dict[str, Any] = {
        "GATE": weight.gate,
        "EVEN": weight.columns % tile.step == 0,
        "STEP": tile.step,
        "SLICES": tile.slices,
        "HALF": multiplied_as(x.dtype),
    }
    arguments: dict[str, Tensor | int | None] = {
        "weight": weight.weight,
        "weight_stride": weight.weight.stride(0) if weight.experts else 0,
    }
    return common.launch(_linear_dense, arguments, constants)


def linear_dense(
    x: Tensor,
    weight: DenseWeight,
    tile: Tile,
    *,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Tensor:
    """``x [rows, columns]`` times the weight, with the epilogue.

    Args:
        x: of the weight's dtype, with contiguous rows.
        weight: from :func:`prepare`, or :meth:`.Weight.joined` with ``routing``.
        tile: the tile.
        out: the output, possibly float32; by default allocated in the inputs' dtype.
        residual: added, of the output's shape; may be ``out`` itself.
        routing: which rows go to which expert.

    Returns:
        ``[rows, outputs]``, or with ``routing`` a row for each of its slots.
    """
    out = room_for(x, weight, out, routing)
    if out.shape[0]:
        launch(x, weight, tile, out, workspace(x.device), residual=residual, routing=routing).run()
    return out


def reference(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gate: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`linear_dense` in float64."""
    sums = x.double() @ weight.double().T
    found = activated(sums if bias is None else sums + bias.double(), gate)
    return found if residual is None else found + residual.double()


@dataclass(frozen=True)
class DenseCase(LinearCase):
    """A test case: a weight and a launch, with random inputs."""

    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype = torch.float16
    gate: str = "none"
    bias: bool = False
    residual: bool = False
    in_place: bool = False  # outputs are written over their residual
    out: torch.dtype | None = None  # None for the inputs' own
    tile: Tile | None = None  # None for the shipped one
    experts: int = 0  # each row goes to two of them
    by_slot: bool = False  # each of the two reads a row of its own, and is multiplied by its share
    prepare: ClassVar[Callable[..., Any]] = staticmethod(prepare)
    product: ClassVar[Callable[..., Tensor]] = staticmethod(linear_dense)
    start: ClassVar[Callable[..., Launch]] = staticmethod(launch)
    reference: ClassVar[Callable[..., Tensor]] = staticmethod(reference)

    @property
    def bits(self) -> int:
        """Bits per weight."""
        return 16

    @property
    def block(self) -> int:
        """The fewest columns of an iteration."""
        return BLOCK

    @property
    def key(self) -> str:
        """The key of its tiles."""
        return "linear_dense"

    @property
    def shape(self) -> LinearShape:
        """The shape that its tile is looked up by; with experts, with the rows of each."""
        rows = max(1, 2 * self.rows // self.experts) if self.experts else self.rows
        return LinearShape(rows, self.outputs, self.columns, self.columns, 16)

    @property
    def shares(self) -> torch.dtype | None:
        return self.dtype if self.by_slot else None

    def weight(self, draw: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of :func:`prepare` and :func:`reference`."""
        values = torch.randn(self.outputs, self.columns, generator=draw, device=draw.device) / self.columns**0.5
        found = {"weight": values.to(self.dtype), "gate": self.gate, **self.drawn_bias(draw)}
        return found, found

    def tile_on(self, tiles: Tiles) -> Tile:
        """Its tile, or the shipped one."""
        form = "experts" if self.experts else "half"
        return self.tile or tiles.find("linear_dense", form, self.shape, BLOCK, self.experts)


_F, _B, _FULL = torch.float16, torch.bfloat16, torch.float32
_TILE = Tile(64, 16, 64, 2, 4, 3, False)
_SLICED = Tile(16, 8, 64, 1, 4, 3, False, slices=4)
_SMALL = [
    DenseCase(1, 80, 512, tile=_SLICED),
    DenseCase(3, 70, 1024, _B, bias=True, residual=True, in_place=True, tile=replace(_SLICED, split=2)),
    DenseCase(9, 48, 512, gate="silu", bias=True, tile=replace(_SLICED, outputs=32, slices=8, warps=8)),
    DenseCase(5, 48, 256, gate="silu", experts=3, tile=_SLICED),
    DenseCase(1, 80, 320, tile=replace(_TILE, rows=8, step=128)),
    DenseCase(3, 70, 300, _B, bias=True, tile=replace(_TILE, split=3)),
    DenseCase(3, 200, 75, tile=replace(_TILE, outputs=128, split=1)),
    DenseCase(16, 96, 256, _B, residual=True, in_place=True, tile=replace(_TILE, split=4)),
    DenseCase(33, 72, 200, residual=True, in_place=True, tile=_TILE),
    DenseCase(33, 130, 256, _B, bias=True, residual=True, tile=replace(_TILE, rows=64, split=1)),
    DenseCase(16, 96, 320, gate="silu", bias=True, residual=True, tile=_TILE),
    DenseCase(3, 112, 130, _B, gate="gelu_tanh", tile=replace(_TILE, outputs=32, split=1)),
    DenseCase(1, 48, 192, gate="silu", residual=True, in_place=True, tile=replace(_TILE, outputs=16, rows=8)),
    DenseCase(3, 70, 256, gate="alone_relu", bias=True, tile=_TILE),
    DenseCase(3, 70, 256, _B, gate="alone_silu", tile=_TILE),
    DenseCase(3, 70, 256, gate="alone_gelu", bias=True, residual=True, in_place=True, tile=replace(_TILE, split=1)),
    DenseCase(17, 70, 256, gate="alone_gelu_tanh", bias=True, tile=_TILE),
    DenseCase(3, 200, 320, _B, out=_FULL, tile=_TILE),
    DenseCase(1, 70, 128, out=_FULL, residual=True, in_place=True, tile=replace(_TILE, split=1)),
    DenseCase(3, 80, 320),
    DenseCase(5, 96, 192, gate="silu", experts=4, tile=replace(_TILE, rows=8, split=1)),
    DenseCase(3, 80, 300, _B, gate="gelu_tanh", experts=7, tile=_TILE),
    DenseCase(6, 70, 256, _B, experts=3, by_slot=True, tile=replace(_TILE, rows=8, split=3)),
    DenseCase(40, 72, 130, experts=3, by_slot=True, tile=replace(_TILE, rows=32, split=1)),
    DenseCase(2, 64, 128, experts=5, by_slot=True),
]
# Of Llama-3-8B, with the shipped tiles.
_LLAMA = [
    one
    for rows in (1, 16)
    for one in (
        DenseCase(rows, 6144, 4096, _B),
        DenseCase(rows, 28672, 4096, _B, gate="silu"),
        DenseCase(rows, 4096, 14336, _B, residual=True, in_place=True),
        DenseCase(rows, 128256, 4096, _B, out=_FULL),
    )
]
# Of Qwen3-30B-A3B, with fewer experts: a token, and steps that give each expert 8, 64 and 512 rows.
_QWEN = [
    one
    for rows in (1, 64, 512, 4096)
    for one in (
        DenseCase(rows, 1536, 2048, _B, gate="silu", experts=16),
        DenseCase(rows, 2048, 768, _B, experts=16, by_slot=True),
    )
]
# More elements than 31-bit indices address.
_MANY = DenseCase(3, 28672, 4096, _B, gate="silu", experts=20)
_LARGE = [*_LLAMA, *(DenseCase(rows, 4096, 4096, dtype) for rows in (7, 32, 64) for dtype in (_F, _B)), *_QWEN, _MANY]
_BUILDS = [_LLAMA[0], _LLAMA[5], _QWEN[2]]
_RARE_BUILDS = [
    *(one for one in (*_LLAMA, *_QWEN) if one not in _BUILDS),
    *(DenseCase(rows, 6144, 4096, _B, bias=True) for rows in (8, 32, 64)),
    *(DenseCase(rows, 28672, 4096, _B, gate="silu", bias=True, residual=True) for rows in (32, 64)),
    DenseCase(1, 16384, 4096, _F, gate="alone_gelu", bias=True, residual=True),
    DenseCase(16, 16384, 4112, _B, gate="alone_gelu_tanh", bias=True),
]
KERNEL = linear_kernel("linear_dense", _SMALL, _LARGE, _BUILDS, _RARE_BUILDS)
