"""Linears of 8-bit weights by 8-bit inputs: int8 and e4m3, scaled by output and token, or by blocks of 128.

Inputs are already rounded, by the preceding norm or attention, or by a launch of quantize_rows. If every
program rounded them itself it would read a whole row before its first weight, and spend five times the
instructions for each weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..base.launch import GENERAL, Launch, interpreted
from ..base.overlap import launch_dependents, prefetch_runs, wait_for_earlier
from ..base.workspace import Workspace, workspace
from ..rows.quantize_rows import LARGEST, NAMES, TARGETS_OF, divided_by, quantize_rows
from ..tiles.tile import LinearShape, Tile
from .case import LinearCase, linear_kernel
from .finish import ONE_TILE, activated, is_gated, store_outputs, sum_of_parts
from .packing import ROWS, interleaved
from .routing import Routing
from .start import Weight, room_for, routed_product, rows_of

CHUNK = 128  # contiguous columns in a row of the packed weight, and the width of a scale block


@triton.jit
def _sum_chunks(
    x_rows,
    x_scales,
    weight,
    block_scales,
    n,
    valid,
    part,
    split,
    chunks,
    K,
    FILLED,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Sums of products over a program's chunks, ``[BN, BM]``, or with slices ``[SLICES, BN, BM]``; scaled if scales are those of blocks.

    Args:
        x_rows, valid: where rows of inputs begin, and which of them are real.
        x_scales: where a row's scales begin, one for each chunk; read with blocks only.
        part, split: which part of the chunks the program has, of how many.
    """
    CODE: tl.constexpr = weight.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if CODE == tl.int8 else tl.float32  # pyright: ignore[reportAssignmentType]
    inner = tl.arange(0, 128)
    steps = tl.cdiv(chunks, SLICES)
    each = tl.cdiv(steps, split)
    # With slices each warp has columns of its own, as if it were a program; sums are added up at the end.
    acc = tl.zeros([SLICES, BN, BM] if SLICES > 1 else [BN, BM], tl.float32 if BLOCKS else SUM)
    for step in tl.range(part * each, tl.minimum(part * each + each, steps), num_stages=STAGES):
        if SLICES > 1:
            chunk = step * SLICES + tl.arange(0, SLICES)[:, None, None]
            weights = tl.load(
                weight + ((chunk * FILLED + n[None, :, None]) * 128 + inner[None, None, :]),
                eviction_policy="evict_first",
            )
            columns = chunk * 128 + inner[None, None, :]
            codes = tl.load(x_rows[None, :, :] + columns, mask=valid[None, :, None], other=0.0)
        else:
            weights = tl.load(
                weight + ((step * FILLED + n)[:, None] * 128 + inner[None, :]),
                eviction_policy="evict_first" if BM <= ONE_TILE else "",
            )
            columns = step * 128 + inner
            mask = valid[:, None] if EVEN else valid[:, None] & (columns < K)[None, :]
            codes = tl.load(x_rows + columns[None, :], mask=mask, other=0.0)
        if SOFT and CODE != tl.int8:
            # The interpreter multiplies the bits of e4m3 as if they were integers.
            weights = weights.to(tl.float32)
            codes = codes.to(tl.float32)
        if BLOCKS:
            scale = tl.load(x_scales + step, mask=valid, other=0.0)
            both = tl.load(block_scales + step * (FILLED // 128) + n // 128)
            acc += tl.dot(weights, tl.trans(codes), out_dtype=SUM).to(tl.float32) * (both[:, None] * scale[None, :])
        elif CODE == tl.int8:
            acc = tl.dot(weights, tl.trans(codes), acc, out_dtype=SUM)
        else:
            # Hopper's sums of e4m3 products have few bits; they are added up in float32 every 128 columns.
            acc = tl.dot(weights, tl.trans(codes), acc, max_num_imprecise_acc=128)
    return acc


@triton.jit(do_not_specialize=GENERAL)
def _linear_bytes(
    x,
    x_scales,
    weight,
    block_scales,
    row_scales,
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
    chunks,
    weight_stride,
    BLOCKS: tl.constexpr,
    GATE: tl.constexpr,
    GROUPED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLICES: tl.constexpr,
    PARTED: tl.constexpr,
    STAGES: tl.constexpr,
    SOFT: tl.constexpr,
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
        mine = tl.cdiv(tl.cdiv(chunks, SLICES), split) * SLICES
        end = tl.minimum(part_id * mine + mine, chunks) - 1
        prefetch_runs(weight, part_id * mine, end, FILLED * 128, pn.to(tl.int64) * BN * 128, BN * 128)
    wait_for_earlier(PDL)
    if GROUPED:
        expert = tl.load(block_expert + pm).to(tl.int64)
        if expert < 0:
            return
        weight += expert * weight_stride
        if row_scales is not None:
            row_scales += expert * FILLED
        if BLOCKS:
            block_scales += expert * chunks * (FILLED // 128)
    slot, valid, x_row = rows_of(slots, place, M, GROUPED, PER_TOKEN)
    x_rows = x + x_row.to(tl.int64)[:, None] * x_stride
    scale = tl.full([BM], 1.0, tl.float32)
    if not BLOCKS:
        scale = tl.load(x_scales + x_row, mask=valid, other=0.0)
    acc = _sum_chunks(
        x_rows, x_scales + x_row * chunks, weight, block_scales, n, valid, part_id, split, chunks, K, FILLED,
        BLOCKS, EVEN, BN, BM, SLICES, STAGES, SOFT,
    )  # fmt: skip
    launch_dependents(PDL)
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    sums = acc.to(tl.float32)
    if PARTED:
        sums, last = sum_of_parts(sums, parts, arrived, pid, part_id, slot, valid, n, M, FILLED, split)
        if not last:
            return
    if not BLOCKS:
        sums *= scale[None, :]
    store_outputs(sums, out, row_scales, bias, residual, shares, pn, slot, valid, N, BN, GATE)


@dataclass(frozen=True)
class BytesWeight(Weight):
    """A packed matrix of 8-bit values, or one for each expert.

    Attributes:
        codes: int8 or e4m3, ``[chunks, rows, 128]``, filled up.
        row_scales: float32, one for each row; None with blocks.
        block_scales: float32 ``[chunks, rows / 128]``; None without blocks.
        bias: one for each row, in the rows' packed order.
    """

    rows: int
    columns: int
    codes: Tensor
    row_scales: Tensor | None
    block_scales: Tensor | None
    bias: Tensor | None
    gate: str
    experts: int


def prepare(
    codes: Tensor,
    *,
    row_scale: Tensor | None = None,
    block_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: str = "none",
) -> BytesWeight:
    """Pack a matrix for :func:`linear_bytes`.

    Args:
        codes: ``[rows, columns]`` of int8 or e4m3.
        row_scale: ``[rows]``.
        block_scale: ``[rows / 128, columns / 128]``, rounded up; instead of ``row_scale``.
        bias: ``[rows]``.
        gate: ``silu`` or ``gelu_tanh`` if the first half of the rows is a gate for the second; with ``alone_``
            before it (also ``relu`` and ``gelu``), an activation of all rows.

    Raises:
        ValueError: the kernel does not support it.
    """
    rows, columns = codes.shape
    if -(-rows // ROWS) * ROWS * -(-columns // ROWS) * ROWS >= 1 << 31:
        raise ValueError(f"a weight of {rows} by {columns} has more elements than 32-bit indices can address")
    if (row_scale is None) == (block_scale is None):
        raise ValueError("a weight needs scales by row or by block")
    if is_gated(gate):
        order = interleaved(rows).to(codes.device)
        if block_scale is not None:
            # Interleaving the rows of gate and up projection breaks the scale blocks of both.
            raise ValueError("a gate in blocks of 128 cannot be fused with its inputs")
        assert row_scale is not None
        codes, row_scale = codes[order], row_scale.flatten()[order]
        bias = None if bias is None else bias[order]
    filled, across = -(-rows // ROWS) * ROWS, -(-columns // CHUNK) * CHUNK
    # torch's padding does not support e4m3; zero bits are zero.
    bits = functional.pad(codes.view(torch.int8), (0, across - columns, 0, filled - rows))
    packed = bits.view(filled, -1, CHUNK).transpose(0, 1).contiguous().view(codes.dtype)
    if row_scale is not None:
        row_scale = functional.pad(row_scale.float().flatten(), (0, filled - rows)).contiguous()
    if block_scale is not None:
        block_scale = block_scale.float().T.contiguous()
    return BytesWeight(
        rows, columns, packed, row_scale, block_scale, None if bias is None else bias.contiguous(), gate, 0
    )


def launch(
    x: Tensor,
    x_scales: Tensor,
    weight: BytesWeight,
    tile: Tile,
    out: Tensor,
    space: Workspace,
    *,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Launch:
    """One product of codes and their scales, ready to run."""
    chunks = -(-weight.columns // CHUNK)
    if tile.slices > 1 and (weight.columns % (CHUNK * tile.slices) or weight.block_scales is not None):
        raise ValueError(f"{weight.columns} columns do not divide into {tile.slices} slices of {CHUNK} with one scale")
    common = routed_product(
        x,
        weight,
        tile,
        out,
        space,
        filled=weight.filled,
        steps=-(-chunks // tile.slices),
        residual=residual,
        routing=routing,
    )
    constants: dict[str, Any] = {
        "BLOCKS": weight.block_scales is not None,
        "GATE": weight.gate,
        "EVEN": weight.columns % CHUNK == 0,
        "SLICES": tile.slices,
        "SOFT": interpreted(),
    }
    arguments: dict[str, Tensor | int | None] = {
        "x_scales": x_scales,
        "weight": weight.codes,
        "block_scales": weight.block_scales,
        "row_scales": weight.row_scales,
        "chunks": chunks,
        "weight_stride": weight.codes.stride(0) if weight.experts else 0,
    }
    return common.launch(_linear_bytes, arguments, constants)


def linear_bytes(
    x: Tensor,
    weight: BytesWeight,
    tile: Tile,
    *,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Tensor:
    """``x [rows, columns]``, rounded to the weight's dtype in a separate launch, times the weight, with the epilogue.

    Args:
        x: float16 or bfloat16.
        weight: from :func:`prepare`, or :meth:`.Weight.joined` with ``routing``.
        tile: the tile.
        out: the output, allocated by default.
        residual: added, of the output's shape.
        routing: which rows go to which expert.

    Returns:
        ``[rows, outputs]``, or with ``routing`` a row for each of its slots.
    """
    out = room_for(x, weight, out, routing)
    if not out.shape[0]:
        return out
    codes, scales = quantize_rows(x, weight.codes.dtype, by_block=weight.block_scales is not None)
    launch(codes, scales, weight, tile, out, workspace(out.device), residual=residual, routing=routing).run()
    return out


def multiply(
    codes: Tensor, scales: Tensor, weight: BytesWeight, tile: Tile, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """Inputs that :func:`quantize_rows` rounded, times the weight, in ``dtype``; plus ``residual``, which is overwritten."""
    out = residual
    if out is None:
        out = torch.empty(codes.shape[0], weight.outputs, dtype=dtype, device=codes.device)
    if codes.shape[0]:
        launch(codes, scales, weight, tile, out, workspace(out.device), residual=residual).run()
    return out


def reference(
    x: Tensor,
    codes: Tensor,
    *,
    row_scale: Tensor | None = None,
    block_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`linear_bytes` in float64, except for the rounding of inputs."""
    values, limit = codes.double(), LARGEST[codes.dtype]
    wide = x.float()
    if block_scale is None:
        assert row_scale is not None
        values = values * row_scale.double().view(-1, 1)
        grouped = wide.unsqueeze(1)
    else:
        across = block_scale.double().repeat_interleave(CHUNK, 0)[: codes.shape[0]]
        values = values * across.repeat_interleave(CHUNK, 1)[:, : codes.shape[1]]
        grouped = functional.pad(wide, (0, -x.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
    scale = divided_by(grouped.abs().amax(-1, keepdim=True), limit)
    scale = torch.where(scale == 0, 1.0, scale)
    found = grouped / scale
    found = found.round().clamp(-128, 127) if codes.dtype == torch.int8 else found.clamp(-limit, limit).to(codes.dtype)
    inputs = (found.double() * scale.double()).flatten(1)[:, : x.shape[1]]
    sums = inputs @ values.T
    if bias is not None:
        sums = sums + bias.double()
    sums = activated(sums, gate)
    return sums if residual is None else sums + residual.double()


@dataclass(frozen=True)
class BytesCase(LinearCase):
    """A test case: a weight and a launch, with random inputs."""

    code: torch.dtype
    rows: int
    outputs: int
    columns: int
    blocks: bool = False
    dtype: torch.dtype = torch.float16
    gate: str = "none"
    bias: bool = False
    residual: bool = False
    in_place: bool = False  # outputs are written over their residual
    tile: Tile | None = None  # None for the shipped one
    experts: int = 0
    by_slot: bool = field(default=True, init=False)
    prepare: ClassVar[Callable[..., Any]] = staticmethod(prepare)
    product: ClassVar[Callable[..., Tensor]] = staticmethod(linear_bytes)
    start: ClassVar[Callable[..., Launch]] = staticmethod(launch)
    reference: ClassVar[Callable[..., Tensor]] = staticmethod(reference)

    @property
    def bits(self) -> int:
        """Bits per weight."""
        return 8

    @property
    def block(self) -> int:
        """Columns that are unpacked together."""
        return CHUNK

    @property
    def key(self) -> str:
        """The key of its tiles."""
        return f"linear_bytes/{NAMES[self.code]}"

    @property
    def shape(self) -> LinearShape:
        """The shape that its tile is looked up by."""
        return LinearShape(self.rows, self.outputs, self.columns, CHUNK if self.blocks else self.columns, 8)

    @property
    def stored(self) -> tuple[str, str]:
        return NAMES[self.code], "by block" if self.blocks else "by row"

    @property
    def targets(self) -> tuple[str, ...]:
        return TARGETS_OF[self.code]

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """Codes and scales."""
        shape = (self.rows, -(-self.columns // CHUNK)) if self.blocks else (self.rows,)
        codes = torch.empty(self.rows, self.columns, dtype=self.code, device=device)
        return codes, torch.empty(shape, device=device)

    def weight(self, draw: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of :func:`prepare` and :func:`reference`."""
        shape = (self.outputs, self.columns)
        if self.code == torch.int8:
            codes, size = (
                torch.randint(-128, 128, shape, generator=draw, device=draw.device, dtype=torch.int8),
                74.0 * self.columns**0.5,
            )
        else:
            codes, size = torch.randn(shape, generator=draw, device=draw.device).to(self.code), self.columns**0.5
        found: dict[str, Any] = {"codes": codes, "gate": self.gate}
        if self.blocks:
            across = (-(-self.outputs // CHUNK), -(-self.columns // CHUNK))
            found["block_scale"] = (torch.rand(across, generator=draw, device=draw.device) + 0.5) / size
        else:
            found["row_scale"] = (torch.rand(self.outputs, generator=draw, device=draw.device) + 0.5) / size
        found |= self.drawn_bias(draw)
        return found, found


_I8, _F8, _Z8, _B = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16
_CODES = (_I8, _F8, _Z8)
_TILE = Tile(64, 16, 128, 2, 4, 3, False)
_SLICED = Tile(16, 8, 128, 1, 4, 3, False, slices=4)
_SMALL = [
    *(BytesCase(code, 1, 80, 512, tile=_SLICED) for code in _CODES),
    *(
        BytesCase(code, 5, 96, 2048, False, _B, "silu", bias=True, residual=True, tile=replace(_SLICED, split=2))
        for code in _CODES
    ),
    BytesCase(_I8, 9, 80, 1024, tile=replace(_SLICED, outputs=32, slices=8, warps=8)),
    BytesCase(_F8, 5, 64, 512, experts=3, tile=_SLICED),
    *(BytesCase(code, 1, 80, 320, blocks, tile=_TILE) for code in _CODES for blocks in (False, True)),
    *(
        BytesCase(code, 19, 200, 256, blocks, _B, tile=replace(_TILE, outputs=128))
        for code in _CODES
        for blocks in (False, True)
    ),
    *(
        BytesCase(code, 5, 96, 300, gate="silu", bias=True, residual=True, tile=replace(_TILE, rows=8, split=3))
        for code in _CODES
    ),
    BytesCase(
        _I8, 5, 72, 300, gate="alone_gelu_tanh", bias=True, residual=True, in_place=True, tile=replace(_TILE, split=3)
    ),
    BytesCase(_F8, 19, 96, 256, False, _B, "alone_silu", residual=True, in_place=True, tile=_TILE),
    BytesCase(_I8, 5, 96, 256, gate="gelu_tanh", tile=replace(_TILE, split=1)),
    *(BytesCase(code, 5, 64, 256, experts=3, tile=_TILE) for code in (_I8, _F8)),
    BytesCase(_F8, 5, 64, 256, blocks=True, experts=3, tile=_TILE),
]
_SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
_LARGE = [
    *(
        BytesCase(code, rows, n, k, blocks, _B)
        for code in _CODES
        for blocks in (False, True)
        for n, k in _SHAPES
        for rows in (1, 16, 300)
        if not (blocks and code == _I8)
    ),
    *(BytesCase(code, rows, 28672, 4096, False, _B, gate="silu") for code in _CODES for rows in (3, 300)),
    BytesCase(_F8, 40, 2048, 4096, experts=8),
]
_BUILDS = [
    *(BytesCase(code, rows, 4096, 4096, False, _B) for code in _CODES for rows in (1, 512)),
    *(BytesCase(code, rows, 4096, 4096, True, _B) for code in (_F8, _Z8) for rows in (1, 512)),
    *(BytesCase(code, 1, 28672, 4096, False, _B, gate="silu") for code in _CODES),
    BytesCase(_I8, 8, 2048, 4096, dtype=_B, experts=8),
]
_RARE_BUILDS = [
    *(BytesCase(code, rows, 4096, 4096, False, _B) for code in _CODES for rows in (16, 64)),
    *(BytesCase(code, 8, 2048, 4096, dtype=_B, experts=8) for code in (_F8, _Z8)),
    *(BytesCase(code, 1, 16384, 4096, dtype=_B, gate="alone_gelu", bias=True, residual=True) for code in _CODES),
    *(BytesCase(code, rows, 4096, 4096, True, _B) for code in (_F8, _Z8) for rows in (16, 64)),
    *(BytesCase(code, 512, 28672, 4096, False, _B, gate="silu") for code in _CODES),
]
KERNEL = linear_kernel("linear_bytes", _SMALL, _LARGE, _BUILDS, _RARE_BUILDS)
