"""MXFP4 weights by MXFP8 inputs, on tensor cores with native support for scales of groups of 32.

Only Blackwell has them; elsewhere :mod:`linear_codes` multiplies such weights by 16-bit inputs. Inputs
lose precision here, so the checkpoint must request it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.kernel import TOLERANCE, Build, Case, Kernel, PreparedCase, moved, poisoned
from ..base.launch import GENERAL, Launch, interpreted
from ..base.overlap import launch_dependents, prefetch_runs, wait_for_earlier
from ..base.targets import Target
from ..base.workspace import Workspace, workspace
from ..rows.quantize_rows import rounded
from ..tiles.tile import LinearShape, Tile, Tiles, tiles_of, tiles_of_target
from .finish import store_outputs, sum_of_parts
from .packing import ROWS
from .start import product
from .unpack import e4m3_to_float32

GROUP = 32
_STEP = 128  # columns of an iteration, and those that a row's bytes lie together for


@triton.jit
def _e2m1_to_float32(code):
    magnitude = code & 7
    exact = tl.where(
        magnitude < 2, magnitude.to(tl.float32) * 0.5, ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    )
    return tl.where((code & 8) != 0, -exact, exact)


@triton.jit
def _soft_dot(weights, w_scales, codes, x_scales, acc, BN: tl.constexpr, BM: tl.constexpr):
    """The same product by plain arithmetic, for the interpreter, which does not know the scaled one."""
    wide = weights.to(tl.int32)
    values = tl.reshape(tl.join(_e2m1_to_float32(wide & 15), _e2m1_to_float32(wide >> 4)), [BN, 4, 32])
    scale = (w_scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    left = tl.reshape(values * scale[:, :, None], [BN, 128])
    inputs = e4m3_to_float32(codes.to(tl.uint8, bitcast=True).to(tl.int32))
    by_group = (x_scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    right = tl.reshape(tl.reshape(inputs, [BM, 4, 32]) * by_group[:, :, None], [BM, 128])
    return tl.dot(left, tl.trans(right), acc)


@triton.jit(do_not_specialize=GENERAL)
def _linear_scaled(
    x,
    weight,
    scales,
    bias,
    residual,
    out,
    parts,
    arrived,
    M,
    N,
    K,
    FILLED,
    x_stride,
    row_tiles,
    split,
    steps,
    PARTED: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    SOFT: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    pid = tl.program_id(0)
    part_id = tl.program_id(1)
    pm = pid % row_tiles
    pn = pid // row_tiles
    n = pn * BN + tl.arange(0, BN)
    slot = pm * BM + tl.arange(0, BM)
    valid = slot < M
    x_rows = x + slot.to(tl.int64)[:, None] * x_stride
    each = tl.cdiv(steps, split)
    if PDL:
        end = tl.minimum(part_id * each + each, steps) - 1
        prefetch_runs(weight, part_id * each, end, FILLED * 64, pn.to(tl.int64) * BN * 64, BN * 64)
    wait_for_earlier(PDL)
    acc = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(part_id * each, tl.minimum(part_id * each + each, steps), num_stages=STAGES):
        weights = tl.load(weight + ((step * FILLED + n)[:, None] * 64 + tl.arange(0, 64)[None, :]))
        w_scales = tl.load(scales + ((step * FILLED + n)[:, None] * 4 + tl.arange(0, 4)[None, :]))
        columns = step * 128 + tl.arange(0, 128)
        mask = valid[:, None] if EVEN else valid[:, None] & (columns < K)[None, :]
        wide = tl.reshape(tl.load(x_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32), [BM, 4, 32])
        # The power of two that brings a group's largest number into e4m3's last binade.
        largest = tl.max(tl.abs(wide), 2).to(tl.int32, bitcast=True)
        x_scales = tl.minimum(tl.maximum((largest >> 23) - 8, 0), 254)
        # What is infinite or no number gives e8m0's NaN.
        x_scales = tl.where((largest >> 23) == 255, 255, x_scales)
        # Of exponents too small for float32's normal numbers everything is 0 anyway.
        power = (tl.maximum(x_scales, 1) << 23).to(tl.float32, bitcast=True)
        codes = tl.reshape(rounded(wide, power[:, :, None], tl.float8e4nv, 448.0, SOFT), [BM, 128])
        if SOFT:
            acc = _soft_dot(weights, w_scales, codes, x_scales.to(tl.uint8), acc, BN, BM)
        else:
            acc = tl.dot_scaled(weights, w_scales, "e2m1", tl.trans(codes), x_scales.to(tl.uint8), "e4m3", acc)
    if PARTED:
        acc, last = sum_of_parts(acc, parts, arrived, pid, part_id, slot, valid, n, M, FILLED, split)
        if not last:
            return
    store_outputs(acc, out, None, bias, residual, None, pn, slot, valid, N, BN, "none")


@dataclass(frozen=True)
class ScaledWeight:
    """A packed MXFP4 matrix.

    Attributes:
        rows, columns: of the matrix.
        codes: uint8 ``[steps, rows, 64]``, two values per byte, padded.
        scales: uint8 ``[steps, rows, 4]``, e8m0.
        bias: one for each row.
    """

    rows: int
    columns: int
    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def filled(self) -> int:
        """Rows, filled up to whole tiles."""
        return -(-self.rows // ROWS) * ROWS


def prepare(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> ScaledWeight:
    """Pack a matrix for :func:`linear_scaled`.

    Args:
        codes: ``[rows, columns / 2]``, as MXFP4 is stored: the low four bits first.
        scale: uint8 ``[rows, columns / 32]``.
        bias: ``[rows]``.

    Raises:
        ValueError: these are not groups of 32.
    """
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if scale.shape != (rows, columns // GROUP) or columns % GROUP:
        raise ValueError(
            f"scales of {list(scale.shape)} do not match {rows} by {columns} elements in groups of {GROUP}"
        )
    filled, across = -(-rows // ROWS) * ROWS, -(-columns // _STEP) * _STEP
    padded = torch.nn.functional.pad(codes, (0, (across - columns) // 2, 0, filled - rows))
    padded_scale = torch.nn.functional.pad(scale.view(torch.uint8), (0, (across - columns) // GROUP, 0, filled - rows))
    return ScaledWeight(
        rows,
        columns,
        padded.view(filled, -1, 64).transpose(0, 1).contiguous(),
        padded_scale.view(filled, -1, 4).transpose(0, 1).contiguous(),
        bias,
    )


def launch(
    x: Tensor, weight: ScaledWeight, tile: Tile, out: Tensor, space: Workspace, residual: Tensor | None = None
) -> Launch:
    """One product, ready to run."""
    steps = weight.codes.shape[0]
    common = product(x, weight, tile, out, space, filled=weight.filled, steps=steps, residual=residual)
    arguments: dict[str, Tensor | int | None] = {"weight": weight.codes, "scales": weight.scales, "steps": steps}
    constants = {"EVEN": weight.columns % _STEP == 0, "SOFT": interpreted()}
    return common.launch(_linear_scaled, arguments, constants)


def linear_scaled(
    x: Tensor, weight: ScaledWeight, tile: Tile, *, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """``x [rows, columns]``, rounded to e4m3 in groups of 32 with powers of two, times the weight."""
    if out is None:
        out = torch.empty(x.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        launch(x, weight, tile, out, workspace(x.device), residual).run()
    return out


def reference(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """:func:`linear_scaled` in float64, except for the rounding of inputs."""
    grouped = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    power = torch.exp2(torch.floor(torch.log2(grouped.abs().amax(-1, keepdim=True))) - 8)
    power = torch.where(power > 0, power, 1.0)
    inputs = ((grouped / power).clamp(-448, 448).to(torch.float8_e4m3fn).double() * power).flatten(1)[:, : x.shape[1]]
    weights = (values.double().unflatten(1, (-1, GROUP)) * torch.exp2(scale.double() - 127).unsqueeze(-1)).flatten(1)
    found = inputs @ weights.T
    found = found if bias is None else found + bias.double()
    return found if residual is None else found + residual.double()


@dataclass(frozen=True)
class _ScaledCase:
    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype
    extras: bool = False  # a bias and a residual
    tile: Tile | None = None

    @property
    def name(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        extras = " bias residual" if self.extras else ""
        return f"mxfp4 by mxfp8 {self.rows}x{self.columns} by {self.outputs} {kind}{extras} {self.tile or ''}".strip()

    def tile_on(self, tiles: Tiles) -> Tile:
        shape = LinearShape(self.rows, self.outputs, self.columns, GROUP, 4)
        return self.tile or tiles.find("linear_scaled", "mxfp4", shape, _STEP)

    def parts(self, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
        nibbles = torch.randint(0, 16, (self.outputs, self.columns), generator=draw, device=draw.device)
        scale = torch.randint(115, 120, (self.outputs, self.columns // GROUP), generator=draw, device=draw.device)
        bias = torch.randn(self.outputs, generator=draw, device=draw.device).to(self.dtype) if self.extras else None
        return nibbles, scale.to(torch.uint8), bias

    def trial(self, device: torch.device, draw: torch.Generator) -> PreparedCase:
        nibbles, scale, bias = self.parts(draw)
        x = torch.randn(self.rows, self.columns, generator=draw, device=draw.device).to(self.dtype)
        residual = torch.randn(self.rows, self.outputs, generator=draw, device=draw.device).to(self.dtype)
        residual = residual if self.extras else None
        table = torch.tensor([s * v for s in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], device=nibbles.device)
        expected = reference(x, table[nibbles], scale, bias, residual)
        weight = prepare((nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8), scale, bias)
        tile = self.tile_on(tiles_of(device))

        def compute() -> Tensor:
            out = poisoned(self.rows, self.outputs, self.dtype, device)
            return linear_scaled(x, weight, tile, out=out, residual=residual)

        return PreparedCase(compute, expected, weight.codes.nbytes)

    def launch(self, target: Target) -> Launch:
        meta = torch.device("meta")
        nibbles, scale, bias = replace(self, outputs=128, columns=256).parts(torch.Generator().manual_seed(0))
        small = prepare(nibbles[:, ::2].to(torch.uint8), scale, bias)
        fields = {name: moved(getattr(small, name), meta) for name in ("scales", "bias")}
        codes = torch.empty(self.columns // _STEP, 128, 64, dtype=torch.uint8, device=meta)
        weight = replace(small, rows=self.outputs, columns=self.columns, codes=codes, **fields)
        x = torch.empty(self.rows, self.columns, dtype=self.dtype, device=meta)
        out = torch.empty(self.rows, self.outputs, dtype=self.dtype, device=meta)
        return launch(
            x, weight, self.tile_on(tiles_of_target(target)), out, Workspace(meta), out if self.extras else None
        )

    def case(self, large: bool = False) -> Case:
        targets = ("sm_100",) if large else ("sm_90", "sm_100")
        return Case(self.name, self.trial, TOLERANCE[self.dtype], large, targets, self.launch)

    def build(self) -> Build:
        return Build(self.name, self.launch, matrix=True, streamed=("weight",), targets=("sm_100",))


_F, _B = torch.float16, torch.bfloat16
_TILE = Tile(128, 16, 128, 2, 4, 3, False)
_SMALL = [_ScaledCase(3, 80, 320, _F, True, _TILE), _ScaledCase(17, 130, 256, _B, False, replace(_TILE, split=1))]
_LARGE = [_ScaledCase(rows, 4096, 14336, _B) for rows in (1, 300)]
_BUILDS = [_ScaledCase(rows, 4096, 4096, _B) for rows in (16, 64, 512)]
KERNEL = Kernel(
    "linear_scaled",
    [*(case.case() for case in _SMALL), *(case.case(large=True) for case in _LARGE)],
    [case.build() for case in _BUILDS],
)
