"""Linears whose weights are packed codes: W2/W3/W4/W8A16, FP8 and FP4 weights, 2:4 sparse W4A16, the planes of W4in8; plain or by expert.

The weights are the left operand of the product and are loaded straight into the registers that tensor
cores read; a step's few rows are the narrow right operand. Programs split the columns (split-K), and the
last one of a tile sums the parts in a fixed order, so equal inputs give bitwise equal outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import GENERAL, Launch, multiplied_as, takes_ptx
from ..base.overlap import launch_dependents, wait_for_earlier
from ..base.workspace import Workspace, workspace
from ..tiles.tile import LinearShape, Tile
from .case import LinearCase, linear_kernel
from .codes_weight import CodesWeight, prepare
from .finish import activated, store_outputs, sum_of_parts
from .packing import FORMATS, SCALES
from .routing import Routing
from .slices import begin_slices, sum_slices
from .start import room_for, routed_product, rows_of
from .steps import sum_steps


@triton.jit(do_not_specialize=GENERAL)
def _linear_codes(
    x,
    codes,
    more,
    scales,
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
    codes_stride,
    more_stride,
    scales_stride,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    SHARE: tl.constexpr,
    G: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FOLD: tl.constexpr,
    GATE: tl.constexpr,
    GROUPED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STEP: tl.constexpr,
    PARTED: tl.constexpr,
    SLICES: tl.constexpr,
    DEEP: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    part_id = tl.program_id(1)
    # Tiles of rows that share weights run together, so that the weights are read from memory once.
    pm = 0 if SINGLE else pid % row_tiles
    pn = pid if SINGLE else pid // row_tiles
    n0 = pn * BN
    n = n0 + tl.arange(0, BN)
    place = pm * BM + tl.arange(0, BM)
    # Columns whose scales share a word.
    COVERS: tl.constexpr = G * SHARE if SHARE > 0 else STEP
    steps = tl.cdiv(K, STEP * SLICES)
    if SLICES > 1 and not GROUPED:
        # Which weights an expert's program reads, an earlier launch says.
        mine = begin_slices(
            codes, more, scales, part_id, steps, n0, EACH, EVEN, ROWS, STEP, BLOCK, BN, FORMAT, KIND, COVERS, SLICES, DEEP
        )  # fmt: skip
    wait_for_earlier(PDL)
    if GROUPED:
        expert = tl.load(block_expert + pm).to(tl.int64)
        if expert < 0:
            return
        codes += expert * codes_stride
        if more is not None:
            more += expert * more_stride
        if scales is not None:
            scales += expert * scales_stride
        if row_scales is not None:
            row_scales += expert * FILLED
    slot, valid, x_row = rows_of(slots, place, M, GROUPED, PER_TOKEN)
    if SLICES > 1:
        if GROUPED:
            mine = begin_slices(
                codes, more, scales, part_id, steps, n0, EACH, EVEN, ROWS, STEP, BLOCK, BN, FORMAT, KIND, COVERS, SLICES, DEEP
            )  # fmt: skip
        acc = sum_slices(
            mine, x, x_row, x_stride, valid, scales, part_id, steps, n0, EACH, EVEN, ROWS, STEP, BLOCK, BN, BM,
            FORMAT, KIND, SHARE, G, SCALE_TYPE, FOLD, COVERS, SLICES, DEEP, HALF, ASM,
        )  # fmt: skip
    else:
        x_rows = x + x_row.to(tl.int64)[:, None] * x_stride
        acc = sum_steps(
            codes, more, scales, x_rows, valid, part_id, steps, split, n0, n, K, FILLED, EVEN, STEP, BLOCK, BN, BM,
            FORMAT, KIND, SHARE, G, SCALE_TYPE, FOLD, COVERS, STAGES, HALF, ASM,
        )  # fmt: skip
    launch_dependents(PDL)
    if PARTED:
        acc, last = sum_of_parts(acc, parts, arrived, pid, part_id, slot, valid, n, M, FILLED, split)
        if not last:
            return
    store_outputs(acc, out, row_scales, bias, residual, shares, pn, slot, valid, N, BN, GATE)


def launch(
    x: Tensor,
    weight: CodesWeight,
    tile: Tile,
    out: Tensor,
    space: Workspace,
    *,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Launch:
    """One product, ready to run."""
    form, share = FORMATS[weight.form], SCALES[weight.kind].groups
    step = max(tile.step, form.block)
    # A small scale times a code may have few bits in float16.
    fold = weight.kind != "none" and ((tile.fold and x.dtype != torch.float16) or weight.group < 64)
    if tile.slices > 1 and (weight.columns % (step * tile.slices) or weight.form == "sparse4"):
        raise ValueError(f"{weight.columns} columns of {weight.form} do not divide into {tile.slices} slices of {step}")
    steps = -(-weight.columns // (step * tile.slices))
    common = routed_product(
        x, weight, tile, out, space, filled=weight.filled, steps=steps, residual=residual, routing=routing
    )
    constants: dict[str, Any] = {
        "FORMAT": weight.form,
        "BLOCK": form.block,
        "KIND": weight.kind,
        "SHARE": share,
        "G": weight.group,
        "SCALE_TYPE": tl.bfloat16 if weight.scale_type == torch.bfloat16 else tl.float16,
        "FOLD": fold,
        "GATE": weight.gate,
        # With slices all columns divide; here it says whether parts are equal.
        "EVEN": steps % common.split == 0 if tile.slices > 1 else weight.columns % step == 0,
        "STEP": step,
        "SLICES": tile.slices,
        "DEEP": tile.slices > 1 and tile.stages > 1,
        # With slices each shape of weights is compiled by itself, so that addresses are sums of constants.
        "EACH": -(-steps // common.split) if tile.slices > 1 else 0,
        "ROWS": weight.filled if tile.slices > 1 else 0,
        "SINGLE": tile.slices > 1 and routing is None and x.shape[0] <= tile.rows,
        "HALF": multiplied_as(x.dtype),
        "ASM": takes_ptx(x.device),
    }
    arguments: dict[str, Tensor | int | None] = {
        "codes": weight.codes,
        "more": weight.more,
        "scales": weight.scales,
        "row_scales": weight.row_scales,
        "codes_stride": weight.codes.stride(0) if weight.experts else 0,
        "more_stride": weight.more.stride(0) if weight.experts and weight.more is not None else 0,
        "scales_stride": weight.scales.stride(0) if weight.experts and weight.scales is not None else 0,
    }
    return common.launch(_linear_codes, arguments, constants)


def linear_codes(
    x: Tensor,
    weight: CodesWeight,
    tile: Tile,
    *,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    routing: Routing | None = None,
) -> Tensor:
    """``x [rows, columns]`` times the weight, with the epilogue.

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
    if out.shape[0]:
        launch(x, weight, tile, out, workspace(x.device), residual=residual, routing=routing).run()
    return out


def reference(
    x: Tensor,
    codes: Tensor,
    *,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`linear_codes` in float64, from the codes' values."""
    values = codes.double()
    if scale is not None:
        wide = scale.double().unsqueeze(-1)
        grouped = values.unflatten(1, (scale.shape[1], -1))
        values = ((grouped if zero is None else grouped - zero.double().unsqueeze(-1)) * wide).flatten(1)
    if row_scale is not None:
        values = values * row_scale.double().view(-1, 1)
    found = x.double() @ values.T
    if bias is not None:
        found = found + bias.double()
    found = activated(found, gate)
    return found if residual is None else found + residual.double()


@dataclass(frozen=True)
class CodesCase(LinearCase):
    """A test case: a weight and a launch, with random inputs."""

    form: str
    rows: int
    outputs: int
    columns: int
    group: int  # 0 for a scale a row
    dtype: torch.dtype = torch.float16
    scale: str = "half"
    zero: bool = False
    gate: str = "none"
    bias: bool = False
    residual: bool = False
    in_place: bool = False  # outputs are written over their residual
    tile: Tile | None = None  # None for the shipped one
    experts: int = 0
    prepare: ClassVar[Callable[..., Any]] = staticmethod(prepare)
    product: ClassVar[Callable[..., Tensor]] = staticmethod(linear_codes)
    start: ClassVar[Callable[..., Launch]] = staticmethod(launch)
    reference: ClassVar[Callable[..., Tensor]] = staticmethod(reference)

    @property
    def bits(self) -> int:
        """Bits per weight."""
        return FORMATS[self.form].bits

    @property
    def block(self) -> int:
        """Columns that are unpacked together."""
        return FORMATS[self.form].block

    @property
    def key(self) -> str:
        """The key of its tiles."""
        return f"linear_codes/{self.form}"

    @property
    def shape(self) -> LinearShape:
        """The shape that its tile is looked up by."""
        return LinearShape(self.rows, self.outputs, self.columns, self.group or self.columns, self.bits)

    @property
    def shares(self) -> torch.dtype:
        return torch.float32

    @property
    def stored(self) -> tuple[str, str, str]:
        return self.form, f"g{self.group}" if self.group else "by row", self.scale

    @property
    def streamed(self) -> tuple[str, ...]:
        return ("codes", "more") if self.form in ("int3", "sparse4", "nested8") else ("codes",)

    @property
    def small(self) -> dict[str, int]:
        return {"outputs": 128, "columns": 8 * (self.group or 64)}

    def packed(self, device: torch.device) -> CodesWeight:
        """A weight of few random codes, repeated: enough for timing at any size."""
        few = replace(self, outputs=256).weight(torch.Generator(device).manual_seed(0))[0]
        whole: dict[str, Any] = {
            name: _repeated(part, self.outputs) if isinstance(part, Tensor) else part for name, part in few.items()
        }
        return prepare(**whole)

    def codes(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes, and their values."""
        shape = (self.outputs, self.columns)
        if self.form == "float4":
            codes = torch.randint(0, 16, shape, generator=draw, device=draw.device)
            return codes, torch.tensor(_E2M1, device=draw.device)[codes]
        if self.form == "float8":
            values = torch.randn(shape, generator=draw, device=draw.device).mul(3).to(torch.float8_e4m3fn)
            return values.view(torch.uint8), values
        bits = {"sparse4": 4, "upper4": 8}.get(self.form, FORMATS[self.form].bits)
        codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, generator=draw, device=draw.device)
        if self.form == "sparse4":
            kept = torch.rand(self.outputs, self.columns // 4, 4, generator=draw, device=draw.device).argsort(-1) < 2
            codes = codes * kept.view(shape)
        return codes, (codes >> 4) * 16 + 8 if self.form == "upper4" else codes

    def weight(self, draw: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of :func:`prepare` and of :func:`reference`."""
        codes, values = self.codes(draw)
        size = float(values.double().square().mean().sqrt() * self.columns**0.5)
        packed: dict[str, Any] = {"codes": codes, "form": self.form, "gate": self.gate}
        plain: dict[str, Any] = {"codes": values, "gate": self.gate}
        groups = self.columns // self.group if self.group else 0
        spread = (torch.rand(self.outputs, max(groups, 1), generator=draw, device=draw.device) + 0.5) / size
        if self.scale == "e8m0":
            bits = torch.randint(-2, 3, spread.shape, generator=draw, device=draw.device) + 127 - round(math.log2(size))
            packed["scale"], plain["scale"] = bits.to(torch.uint8), torch.exp2(bits.double() - 127)
        elif self.scale == "e4m3":
            packed["scale"] = plain["scale"] = (spread * size * 8).to(torch.float8_e4m3fn)
            packed["row_scale"] = plain["row_scale"] = torch.full((self.outputs,), 0.125 / size, device=draw.device)
        elif groups:
            kind = torch.float32 if self.scale == "full" else self.dtype
            packed["scale"] = plain["scale"] = spread.to(kind)
        else:
            packed["row_scale"] = plain["row_scale"] = spread.flatten()
        if self.zero:
            half = 1 << (FORMATS[self.form].bits - 1)
            packed["zero"] = plain["zero"] = torch.randint(
                -half, half, (self.outputs, groups), generator=draw, device=draw.device
            )
        bias = self.drawn_bias(draw)
        return packed | bias, plain | bias


def _repeated(part: Tensor, rows: int) -> Tensor:
    return part.repeat(-(-rows // part.shape[0]), *[1] * (part.dim() - 1))[:rows]


_E2M1 = [s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_F, _B = torch.float16, torch.bfloat16
_DECODE, _PREFILL = Tile(64, 16, 256, 2, 4, 3, False), Tile(128, 32, 64, 3, 4, 3, True)
_SLICED = Tile(16, 8, 256, 1, 4, 1, False, slices=4)
_DEEP = replace(_SLICED, step=64, stages=2)

# Small and awkward: one row, odd ones, widths that no tile divides, every format and option.
_SMALL = [
    CodesCase("int4", 1, 96, 512, 128, tile=_DECODE),
    CodesCase("int4", 3, 80, 320, 64, _B, tile=_DECODE),
    CodesCase("int4", 9, 80, 512, 128, tile=replace(_DECODE, rows=8)),
    CodesCase("int4", 16, 200, 512, 128, tile=replace(_DECODE, outputs=128, split=5)),
    CodesCase("int4", 17, 64, 256, 32, tile=_DECODE),
    CodesCase("int4", 33, 80, 272, 16, tile=_PREFILL),
    CodesCase("int4", 33, 130, 512, 128, _B, tile=_PREFILL),
    CodesCase("int4", 40, 80, 384, 128, tile=replace(_PREFILL, step=128, fold=False, split=1)),
    CodesCase("int4", 5, 80, 1000, 0, tile=_DECODE),
    CodesCase("int4", 2, 64, 512, 256, tile=_DECODE),
    CodesCase("int4", 2, 64, 384, 96, tile=_DECODE),
    CodesCase("int4", 3, 80, 512, 128, zero=True, tile=_DECODE),
    CodesCase("int4", 3, 80, 320, 32, zero=True, tile=_DECODE),
    CodesCase("int4", 33, 64, 512, 128, _B, zero=True, tile=_PREFILL),
    CodesCase("int4", 3, 64, 512, 128, scale="full", tile=_DECODE),
    CodesCase("int4", 3, 96, 512, 128, gate="silu", bias=True, residual=True, tile=_DECODE),
    CodesCase("int4", 3, 160, 512, 128, _B, gate="gelu_tanh", tile=replace(_DECODE, split=1)),
    CodesCase("int4", 3, 70, 512, 128, bias=True, residual=True, tile=_DECODE),
    CodesCase("int4", 3, 70, 512, 128, gate="alone_gelu", bias=True, residual=True, in_place=True, tile=_DECODE),
    CodesCase("int4", 17, 80, 256, 128, _B, gate="alone_relu", residual=True, in_place=True, tile=_DECODE),
    CodesCase("int4", 5, 96, 512, 128, gate="silu", experts=4, tile=replace(_DECODE, split=1)),
    CodesCase("int8", 5, 64, 512, 128, tile=_DECODE),
    CodesCase("int8", 5, 72, 320, 0, _B, tile=_DECODE),
    CodesCase("int8", 33, 64, 320, 32, _B, zero=True, tile=_PREFILL),
    CodesCase("int8", 5, 64, 256, 64, experts=3, tile=_DECODE),
    CodesCase("int3", 5, 64, 512, 128, tile=_DECODE),
    CodesCase("int3", 3, 72, 320, 64, _B, zero=True, tile=_DECODE),
    CodesCase("int3", 18, 64, 512, 32, tile=replace(_PREFILL, step=256)),
    CodesCase("int2", 5, 64, 512, 128, zero=True, tile=_DECODE),
    CodesCase("int2", 3, 72, 320, 64, _B, tile=_DECODE),
    CodesCase("int2", 18, 64, 512, 16, tile=replace(_PREFILL, step=128)),
    CodesCase("float8", 5, 64, 512, 0, tile=_DECODE),
    CodesCase("float8", 5, 72, 384, 128, _B, scale="full", tile=_DECODE),
    CodesCase("float8", 18, 64, 512, 0, tile=_PREFILL),
    CodesCase("float4", 5, 64, 512, 16, scale="e4m3", tile=_DECODE),
    CodesCase("float4", 5, 72, 320, 32, _B, scale="e8m0", tile=_DECODE),
    CodesCase("float4", 18, 64, 256, 16, _B, scale="e4m3", tile=_PREFILL),
    CodesCase("float4", 4, 64, 256, 32, scale="e8m0", experts=3, tile=_DECODE),
    CodesCase("nested8", 5, 64, 512, 128, tile=_DECODE),
    CodesCase("nested8", 5, 72, 320, 0, _B, tile=_DECODE),
    CodesCase("nested8", 33, 64, 320, 32, _B, tile=_PREFILL),
    CodesCase("nested8", 3, 96, 512, 128, gate="silu", bias=True, residual=True, tile=_DECODE),
    CodesCase("nested8", 5, 64, 256, 64, experts=3, tile=_DECODE),
    CodesCase("upper4", 5, 64, 512, 128, tile=_DECODE),
    CodesCase("upper4", 5, 72, 320, 0, _B, tile=_DECODE),
    CodesCase("upper4", 33, 64, 320, 32, _B, tile=_PREFILL),
    CodesCase("upper4", 3, 96, 512, 128, scale="full", gate="silu", bias=True, residual=True, tile=_DECODE),
    CodesCase("upper4", 5, 64, 256, 64, experts=3, tile=_DECODE),
    CodesCase("sparse4", 5, 64, 512, 128, tile=_DECODE),
    CodesCase("sparse4", 3, 72, 320, 64, _B, tile=_DECODE),
    CodesCase("sparse4", 18, 64, 512, 0, tile=replace(_PREFILL, step=256)),
    CodesCase("sparse4", 4, 64, 256, 64, experts=3, tile=_DECODE),
    CodesCase("int4", 1, 96, 1024, 128, tile=_SLICED),
    CodesCase("int4", 3, 96, 2048, 128, _B, gate="silu", bias=True, residual=True, tile=replace(_SLICED, split=2)),
    CodesCase("int4", 9, 80, 512, 128, zero=True, tile=replace(_SLICED, step=128)),
    CodesCase("int4", 3, 80, 512, 32, zero=True, tile=replace(_SLICED, step=64, slices=8, warps=8)),
    CodesCase("int4", 5, 80, 1024, 0, tile=replace(_SLICED, outputs=32, slices=2, warps=2)),
    CodesCase("int4", 5, 64, 512, 128, experts=3, tile=replace(_SLICED, step=128)),
    # Five iterations: of four parts of two the last one has none.
    CodesCase("int4", 3, 64, 1280, 128, tile=replace(_SLICED, step=64, split=4)),
    CodesCase("int8", 3, 64, 1024, 128, tile=_SLICED),
    CodesCase("nested8", 3, 64, 1024, 128, tile=_SLICED),
    CodesCase("upper4", 3, 64, 1024, 128, _B, tile=_SLICED),
    CodesCase("int3", 3, 64, 1024, 64, tile=_SLICED),
    CodesCase("int2", 3, 64, 1024, 128, zero=True, tile=_SLICED),
    CodesCase("float4", 3, 64, 512, 16, scale="e4m3", tile=replace(_SLICED, step=128)),
    CodesCase("float4", 3, 64, 512, 32, _B, scale="e8m0", tile=replace(_SLICED, step=64, slices=8)),
    CodesCase("float8", 3, 64, 512, 128, _B, scale="full", tile=replace(_SLICED, step=128)),
    # Two iterations ahead, where there are one, two and more of them, and where parts have unequal ones.
    CodesCase("int4", 1, 64, 256, 128, tile=_DEEP),
    CodesCase("int4", 3, 80, 512, 32, zero=True, tile=_DEEP),
    CodesCase("int4", 3, 96, 1280, 128, _B, gate="silu", bias=True, residual=True, tile=replace(_DEEP, split=2)),
    CodesCase("int4", 3, 64, 1280, 128, tile=replace(_DEEP, split=4)),
    CodesCase("int4", 5, 64, 768, 64, experts=3, tile=_DEEP),
    CodesCase("int8", 3, 64, 768, 128, tile=_DEEP),
    CodesCase("int3", 3, 64, 1024, 64, tile=_DEEP),
    CodesCase("nested8", 3, 64, 1024, 128, _B, tile=_DEEP),
    CodesCase("float4", 3, 64, 768, 16, scale="e4m3", tile=_DEEP),
]
# Of Llama-3-8B, with the shipped tiles.
_SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
_LARGE = [
    *(
        CodesCase("int4", rows, n, k, 128, dtype)
        for n, k in _SHAPES
        for rows in (1, 7, 16, 64, 512)
        for dtype in (_B, _F)
    ),
    *(
        CodesCase(form, rows, 4096, 14336, 128, _B)
        for form in ("int2", "int3", "int8", "nested8", "upper4", "sparse4")
        for rows in (1, 16, 300)
    ),
    *(CodesCase("float4", rows, 4096, 14336, 16, _B, scale="e4m3") for rows in (1, 300)),
    *(CodesCase("float4", rows, 4096, 14336, 32, _B, scale="e8m0") for rows in (1, 300)),
    *(CodesCase("float8", rows, 4096, 14336, 0, _B) for rows in (1, 300)),
    CodesCase("int4", 1, 28672, 4096, 128, _B, gate="silu"),
    CodesCase("int4", 300, 28672, 4096, 128, _B, gate="silu", bias=True, residual=True),
    CodesCase("int4", 9, 4096, 14336, 32, _B, zero=True),
    CodesCase("int4", 1030, 4096, 4096, 128, _B),
    CodesCase("int4", 40, 2048, 4096, 128, _B, gate="silu", experts=8),
]
_BUILDS = [
    *(CodesCase("int4", rows, 4096, 4096, 128, _B) for rows in (1, 32, 512)),
    CodesCase("int4", 1, 4096, 4096, 128, _F),
    CodesCase("int4", 1, 4096, 4096, 128, _B, zero=True),
    CodesCase("int4", 1, 28672, 4096, 128, _B, gate="silu", bias=True, residual=True),
    CodesCase("int4", 8, 2048, 4096, 128, _B, gate="silu", experts=8),
    *(CodesCase(form, 1, 4096, 4096, 128, _B) for form in ("int2", "int3", "int8", "nested8", "upper4", "sparse4")),
    CodesCase("sparse4", 512, 4096, 4096, 128, _B),
    *(CodesCase("float4", rows, 4096, 4096, 16, _B, scale="e4m3") for rows in (1, 512)),
    CodesCase("float4", 1, 4096, 4096, 32, _B, scale="e8m0"),
    CodesCase("float8", 1, 4096, 4096, 0, _B),
]
_RARE_BUILDS = [
    *(CodesCase("int4", rows, 4096, 4096, 128, _B) for rows in (16, 64)),
    CodesCase("int4", 1, 4096, 4096, 32, _B),
    *(CodesCase("int4", rows, 28672, 4096, 128, _B, gate="silu") for rows in (512, 1024)),
    *(
        CodesCase("int4", 1, 16384, 4096, 128, _B, gate=gate, bias=True, residual=True)
        for gate in ("alone_gelu", "alone_gelu_tanh")
    ),
    CodesCase("int4", 512, 4096, 4096, 128, _F),
    CodesCase("int4", 1024, 4096, 4096, 128, _B, residual=True),
    CodesCase("int8", 1024, 4096, 4096, 128, _B, zero=True),
    CodesCase("int4", 512, 4096, 4096, 128, _B, zero=True),
    CodesCase("int4", 1, 4096, 4096, 64, _B),
    *(CodesCase(form, 512, 4096, 4096, 128, _B) for form in ("int2", "int3", "int8", "nested8", "upper4")),
    CodesCase("float8", 512, 4096, 4096, 0, _B),
    CodesCase("float8", 1, 4096, 4096, 128, _B, scale="full"),
]
KERNEL = linear_kernel("linear_codes", _SMALL, _LARGE, _BUILDS, _RARE_BUILDS)
