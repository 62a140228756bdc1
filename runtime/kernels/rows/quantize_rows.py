"""Rounding inputs to 8 bits, or fake quantization; each row (or each 128 elements of it) has a scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.kernel import TOLERANCE, Build, Case, Kernel, PreparedCase
from ..base.launch import Launch, interpreted
from ..base.overlap import wait_and_launch
from ..base.targets import Target

# The code of a row's largest magnitude: for int8 it is between its two ends, as in compressed-tensors.
LARGEST = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
CODES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8}
NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e4m3fnuz: "e4m3fnuz"}
TARGETS_OF = {
    torch.int8: ("sm_80", "sm_90", "sm_100", "gfx942"),
    torch.float8_e4m3fn: ("sm_90", "sm_100"),
    # The first Instinct cards with 8-bit floats have another exponent bias, and no negative zero.
    torch.float8_e4m3fnuz: ("gfx942",),
}
_BLOCK = 128
_TILE = 2048  # 16 bytes for each thread of four warps, of 32 or of 64


@triton.jit
def larger(largest, values):
    """The larger magnitude of each, and NaN where there is one."""
    return tl.maximum(largest, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(magnitudes, AXIS: tl.constexpr, LIMIT: tl.constexpr):
    """The scale of numbers of these magnitudes along an axis: 1 for zeros, NaN if one is infinite or no number."""
    largest = tl.max(magnitudes, AXIS)
    scale = tl.div_rn(largest, tl.full(largest.shape, LIMIT, tl.float32))
    # A maximum of many drops what is no number; a sum keeps it, and whoever looks at the outputs must see it.
    return tl.where(scale == 0.0, 1.0, scale) + tl.sum(magnitudes * 0.0, AXIS)


@triton.jit
def _on_e4m3(values, CODE: tl.constexpr):
    """float32 rounded to what e4m3 has, halves to even."""
    # Below its least normal number there are eight multiples of its least one; those are what stays when a power of two
    # and a half is added whose last bit is as large.
    NORMAL: tl.constexpr = 0.0078125 if CODE == tl.float8e4b8 else 0.015625  # pyright: ignore[reportAssignmentType]
    MAGIC: tl.constexpr = NORMAL * 1572864.0
    small = (values + MAGIC) - MAGIC
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(values) < NORMAL, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def _nearest(values, scale, CODE: tl.constexpr, LIMIT: tl.constexpr, SOFT: tl.constexpr):
    """float32 values over their scale, rounded to numbers that a code has, still in float32."""
    found = tl.div_rn(values, scale + tl.zeros_like(values))
    if CODE == tl.int8:
        # Adding 1.5 x 2^23 leaves no bits behind the point.
        found = (found + 12582912.0) - 12582912.0
        return tl.minimum(tl.maximum(found, -128.0), 127.0)
    found = tl.minimum(tl.maximum(found, -LIMIT), LIMIT)
    if SOFT:
        found = _on_e4m3(found, CODE)
    return found


@triton.jit
def rounded(values, scale, CODE: tl.constexpr, LIMIT: tl.constexpr, SOFT: tl.constexpr):
    """float32 values over their scale, to the nearest code; halves to even.

    ``SOFT`` rounds by arithmetic: Triton's interpreter cuts bits off where devices round.
    """
    return _nearest(values, scale, CODE, LIMIT, SOFT).to(CODE)


@triton.jit
def _kept(values, scale, codes, CODE: tl.constexpr, LIMIT: tl.constexpr, SOFT: tl.constexpr, BACK: tl.constexpr):
    """Codes, or what they stand for."""
    if BACK:
        # By arithmetic: not every device has e4m3.
        return (_nearest(values, scale, CODE, LIMIT, True) * scale).to(codes.dtype.element_ty)
    else:
        return rounded(values, scale, CODE, LIMIT, SOFT)


@triton.jit
def _quantize_rows(
    x,
    codes,
    scales,
    K,
    x_stride,
    blocks,
    CODE: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    TILE: tl.constexpr,
    SOFT: tl.constexpr,
    BACK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, TILE)
    if BY_BLOCK:
        which = tl.arange(0, TILE // 128)
        for start in range(0, K, TILE):
            columns = start + inner
            values = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
            by_block = tl.reshape(values, [TILE // 128, 128])
            scale = scale_of(tl.abs(by_block), 1, LIMIT)
            found = _kept(by_block, scale[:, None], codes, CODE, LIMIT, SOFT, BACK)
            tl.store(codes + row * K + columns, tl.reshape(found, [TILE]), mask=columns < K)
            if not BACK:
                block = start // 128 + which
                tl.store(scales + row * blocks + block, scale, mask=block < blocks)
    else:
        largest = tl.zeros([TILE], tl.float32)
        for start in range(0, K, TILE):
            columns = start + inner
            values = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
            largest = larger(largest, values)
        scale = scale_of(largest, 0, LIMIT)
        if not BACK:
            tl.store(scales + row, scale)
        for start in range(0, K, TILE):
            columns = start + inner
            values = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
            found = _kept(values, scale, codes, CODE, LIMIT, SOFT, BACK)
            tl.store(codes + row * K + columns, found, mask=columns < K)


def launch(x: Tensor, codes: Tensor, scales: Tensor | None, code: torch.dtype, by_block: bool) -> Launch:
    """One rounding, ready to run; without scales ``codes`` gets what the codes stand for."""
    arguments: dict[str, Tensor | int | None] = {
        "x": x,
        "codes": codes,
        "scales": scales,
        "K": x.shape[1],
        "x_stride": x.stride(0),
        "blocks": -(-x.shape[1] // _BLOCK) if by_block else 1,
    }
    constants = {
        "CODE": CODES[code],
        "BY_BLOCK": by_block,
        "LIMIT": LARGEST[code],
        "TILE": _TILE,
        "SOFT": interpreted(),
        "BACK": scales is None,
    }
    return Launch(_quantize_rows, arguments, constants, (x.shape[0],), 4, 2)


def quantize_rows(x: Tensor, dtype: torch.dtype, *, by_block: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of ``x [rows, columns]``.

    Args:
        x: float16 or bfloat16, with contiguous rows.
        dtype: int8 or e4m3.
        by_block: a scale for each 128 columns instead of each row.
    """
    codes, scales = code_room(x, dtype, by_block=by_block)
    if x.shape[0]:
        launch(x, codes, scales, dtype, by_block).run()
    return codes, scales


def code_room(x: Tensor, dtype: torch.dtype, *, by_block: bool = False) -> tuple[Tensor, Tensor]:
    """Memory for codes and scales of ``x``."""
    rows, columns = x.shape
    shape = (rows, -(-columns // _BLOCK)) if by_block else (rows,)
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    return codes, torch.empty(shape, dtype=torch.float32, device=x.device)


def round_rows(x: Tensor, dtype: torch.dtype, *, by_block: bool = False) -> Tensor:
    """``x`` after fake quantization, in its dtype; also where the device does not support the codes.

    Args:
        x: see :func:`quantize_rows`.
        dtype: int8 or e4m3.
        by_block: see there.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        launch(x, out, None, dtype, by_block).run()
    return out


def divided_by(values: Tensor, limit: float) -> Tensor:
    """Rounded once: by a Python number torch multiplies with its rounded reciprocal on a GPU."""
    return values / torch.tensor(limit, device=values.device)


def reference(x: Tensor, dtype: torch.dtype, *, by_block: bool = False) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` in plain torch."""
    wide = x.float()
    grouped = torch.nn.functional.pad(wide, (0, -x.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK)) if by_block else wide
    scale = divided_by(grouped.abs().amax(-1, keepdim=True), LARGEST[dtype])
    scale = torch.where(scale == 0, 1.0, scale)
    found = grouped / scale
    found = found.round().clamp(-128, 127) if dtype == torch.int8 else found.clamp(-LARGEST[dtype], LARGEST[dtype])
    return found.flatten(1)[:, : x.shape[1]].to(dtype), scale.squeeze(-1)


def _case(rows: int, columns: int, code: torch.dtype, by_block: bool, dtype: torch.dtype) -> Case:
    """Codes must be exactly those of the reference, and with them the scales."""

    def prepare(device: torch.device, draw: torch.Generator) -> PreparedCase:
        x = torch.randn(rows, columns, generator=draw, device=draw.device)
        x[0] = 0  # a row of zeros has a scale, too
        x = x.to(dtype).to(device)
        expected = torch.cat([part.double().flatten() for part in reference(x, code, by_block=by_block)])

        def compute() -> Tensor:
            codes, scales = quantize_rows(x, code, by_block=by_block)
            return torch.cat([codes.float().flatten(), scales.flatten()])

        return PreparedCase(compute, expected, x.nbytes)

    name = f"{NAMES[code]} {'by block' if by_block else 'by row'} {rows}x{columns} {dtype}"
    return Case(name.replace("torch.", ""), prepare, 0.0, rows * columns > 1 << 20, TARGETS_OF[code])


def _case_back(rows: int, columns: int, code: torch.dtype, by_block: bool, dtype: torch.dtype) -> Case:
    """The last rounding, to ``dtype``, is one of the device."""

    def prepare(device: torch.device, draw: torch.Generator) -> PreparedCase:
        x = torch.randn(rows, columns, generator=draw, device=draw.device)
        x[0] = 0
        x = x.to(dtype).to(device)
        codes, scales = (part.double() for part in reference(x, code, by_block=by_block))
        each = scales.repeat_interleave(_BLOCK, 1)[:, :columns] if by_block else scales[:, None]
        return PreparedCase(lambda: round_rows(x, code, by_block=by_block), codes * each, x.nbytes)

    name = f"{NAMES[code]} and back {'by block' if by_block else 'by row'} {rows}x{columns} {dtype}"
    return Case(name.replace("torch.", ""), prepare, TOLERANCE[dtype], rows * columns > 1 << 20)


def _build(code: torch.dtype, by_block: bool, back: bool = False) -> Build:
    def launch_on_meta(target: Target) -> Launch:
        x = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")
        scales = torch.empty((512, 32) if by_block else (512,), device="meta")
        codes = torch.empty(512, 4096, dtype=x.dtype if back else code, device="meta")
        return launch(x, codes, None if back else scales, code, by_block)

    name = f"{NAMES[code]} {'and back ' * back}{'by block' if by_block else 'by row'}"
    return Build(
        name, launch_on_meta, matrix=False, streamed=("x",), targets=() if back else TARGETS_OF[code], rare=back
    )


_BACK = [(torch.int8, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True)]
_KINDS = [(code, by_block) for code in LARGEST for by_block in (False, True)]
KERNEL = Kernel(
    "quantize_rows",
    [
        _case(*size, *kind, dtype)
        for kind in _KINDS
        for size, dtype in (((3, 1300), torch.float16), ((2, 256), torch.bfloat16))
    ]
    + [_case(512, 14336, *kind, torch.bfloat16) for kind in _KINDS]
    + [_case_back(3, 1300, *kind, torch.float16) for kind in _BACK]
    + [_case_back(512, 14336, *kind, torch.bfloat16) for kind in _BACK],
    [*(_build(*kind) for kind in _KINDS), *(_build(*kind, back=True) for kind in _BACK)],
)
