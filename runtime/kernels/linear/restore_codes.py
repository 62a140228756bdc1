"""Unpacking codes to a dense matrix, for steps with so many rows that a dense product is faster in total."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.kernel import TOLERANCE, Build, Case, Kernel, PreparedCase, moved, poisoned
from ..base.launch import Launch, multiplied_as, takes_ptx
from ..base.overlap import wait_and_launch
from ..base.targets import Target
from .codes import pieces_of, scaled, words_of
from .codes_weight import CodesWeight, prepare
from .linear_codes import CodesCase
from .packing import FORMATS, SCALES

_ROWS = 64  # that a program restores, 256 columns wide


@triton.jit
def _restore_codes(
    codes,
    more,
    scales,
    row_scales,
    out,
    N,
    K,
    FILLED,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    SHARE: tl.constexpr,
    G: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    BN: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_launch(PDL)
    n0 = tl.program_id(0) * BN
    step = tl.program_id(1)
    n = n0 + tl.arange(0, BN)
    COVERS: tl.constexpr = G * SHARE if SHARE > 0 else 256  # pyright: ignore[reportAssignmentType]
    by_row = tl.full([BN], 1.0, tl.float32)
    if row_scales is not None:
        by_row = tl.load(row_scales + n)
    for b in tl.static_range(256 // BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        words = words_of(codes, more, step * (256 // BLOCK) + b, FILLED, n0, BN, FORMAT, True)
        found = pieces_of(words, FORMAT, HALF, ASM)
        for i in tl.static_range(BLOCK // 16):
            k = step * 256 + b * BLOCK + i * 16
            piece = found[i]
            if KIND != "none":
                word = tl.load(scales + (k // COVERS) * FILLED + n)
                piece = scaled(piece, word, k % COVERS // G, KIND, SCALE_TYPE, HALF, True, ASM)
            if row_scales is not None:
                piece = (piece.to(tl.float32) * by_row[:, None]).to(HALF)
            if FORMAT == "sparse4":
                # Of four neighbours each is in another piece.
                columns = step * 256 + (b * BLOCK + i * 16) // 64 * 64 + tl.arange(0, 16) * 4 + i % 4
            else:
                columns = k + tl.arange(0, 16)
            to = out + n.to(tl.int64)[:, None] * K + columns[None, :]
            tl.store(to, piece.to(out.dtype.element_ty), mask=(n < N)[:, None] & (columns < K)[None, :])


def launch(weight: CodesWeight, out: Tensor) -> Launch:
    """One restoring, ready to run; rows come in their packed order."""
    form = FORMATS[weight.form]
    arguments: dict[str, Tensor | int | None] = {
        "codes": weight.codes,
        "more": weight.more,
        "scales": weight.scales,
        "row_scales": weight.row_scales,
        "out": out,
        "N": weight.rows,
        "K": weight.columns,
        "FILLED": weight.filled,
    }
    constants: dict[str, Any] = {
        "FORMAT": weight.form,
        "BLOCK": form.block,
        "KIND": weight.kind,
        "SHARE": SCALES[weight.kind].groups,
        "G": weight.group,
        "SCALE_TYPE": tl.bfloat16 if weight.scale_type == torch.bfloat16 else tl.float16,
        "BN": _ROWS,
        "HALF": multiplied_as(out.dtype),
        "ASM": takes_ptx(out.device),
    }
    grid = (weight.filled // _ROWS, -(-weight.columns // 256))
    return Launch(_restore_codes, arguments, constants, grid, 4, 1)


def restore_codes(weight: CodesWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The values of a packed matrix, ``[rows, columns]``; a gate's rows stay interleaved with its up projection's.

    Args:
        weight: without experts.
        dtype: float16 or bfloat16.
        out: the output, allocated by default.
    """
    if out is None:
        out = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.codes.device)
    launch(weight, out).run()
    return out


def _case(given: CodesCase, large: bool = False) -> Case:
    def trial(device: torch.device, draw: torch.Generator) -> PreparedCase:
        packed, plain = given.weight(draw)
        weight, values = prepare(**moved(packed, device)), plain["codes"].double().to(device)
        if "scale" in plain:
            groups = plain["scale"].double().to(device).unsqueeze(-1)
            values = values.unflatten(1, (groups.shape[1], -1))
            values = (
                values - moved(plain["zero"], device).double().unsqueeze(-1) if "zero" in plain else values
            ) * groups
            values = values.flatten(1)
        if "row_scale" in plain:
            values = values * plain["row_scale"].double().to(device).view(-1, 1)

        def compute() -> Tensor:
            return restore_codes(weight, given.dtype, poisoned(given.outputs, given.columns, given.dtype, device))

        return PreparedCase(compute, values, weight.nbytes)

    return Case(given.name, trial, TOLERANCE[given.dtype], large)


def _build(given: CodesCase) -> Build:
    def on_meta(target: Target) -> Launch:
        meta = torch.device("meta")
        weight = prepare(**replace(given, outputs=16, columns=512).weight(torch.Generator().manual_seed(0))[0])
        fields = {name: moved(getattr(weight, name), meta) for name in ("codes", "more", "scales", "row_scales")}
        weight = replace(weight, rows=given.outputs, columns=given.columns, **fields)
        return launch(weight, torch.empty(given.outputs, given.columns, dtype=given.dtype, device=meta))

    return Build(given.name, on_meta, matrix=False, streamed=())


_F, _B = torch.float16, torch.bfloat16
_SMALL = [
    CodesCase("int4", 1, 80, 272, 16, _F),
    CodesCase("int4", 1, 64, 512, 128, _B, zero=True),
    CodesCase("int3", 1, 72, 320, 64, _F),
    CodesCase("int2", 1, 64, 256, 32, _F),
    CodesCase("int8", 1, 64, 320, 0, _B),
    CodesCase("nested8", 1, 64, 320, 0, _B),
    CodesCase("upper4", 1, 64, 320, 64, _B),
    CodesCase("float8", 1, 64, 256, 128, _F, scale="full"),
    CodesCase("float4", 1, 64, 256, 16, _B, scale="e4m3"),
    CodesCase("float4", 1, 64, 256, 32, _F, scale="e8m0"),
    CodesCase("sparse4", 1, 64, 512, 128, _F),
]
KERNEL = Kernel(
    "restore_codes",
    [*(_case(case) for case in _SMALL), _case(CodesCase("int4", 1, 4096, 14336, 128, _B), large=True)],
    [
        _build(replace(_SMALL[1], outputs=4096, columns=4096)),
        _build(replace(_SMALL[8], outputs=4096, columns=4096)),
        *(_build(CodesCase(form, 1, 4096, 4096, 128, _B)) for form in ("nested8", "upper4")),
    ],
)
