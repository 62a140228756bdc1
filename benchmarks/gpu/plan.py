"""What is measured, the most telling first: our kernels and what others have for the same products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from smelt.runtime.kernels import linear_bytes, linear_codes
from smelt.runtime.kernels.linear_bytes import BytesCase
from smelt.runtime.kernels.linear_codes import CodesCase
from smelt.runtime.kernels.quantize_rows import quantize_rows
from smelt.runtime.kernels.tile import tiles_of
from torch import Tensor

from . import peers

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # outputs and columns of Llama-3-8B
ROWS = (1, 16, 512, 64, 2048, 4)
FOUR, SPARSE, BF16 = "W4A16 g128", "2:4 W4A16 g128", "torch bf16"
TORCH4, GEMLITE4 = "torch int4 g128", "gemlite int4 g128"
EIGHT, EIGHT_BEFORE = "FP8 W8A8, rounding its inputs", "FP8 W8A8, inputs rounded"
TORCH8 = "torch _scaled_mm e4m3, inputs rounded"
B, F8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Planned:
    """One measurement to be made.

    Attributes:
        method: what it is called.
        rows, outputs, columns: the product.
        nbytes: of its weight, scales included.
        make: from inputs and a number of copies of the weight, as many calls.
        case: what of ours is to be compiled before; None for others'.
    """

    method: str
    rows: int
    outputs: int
    columns: int
    nbytes: int
    make: Callable[[Tensor, int, int], peers.Calls]
    case: CodesCase | BytesCase | None


def plan(quick: bool) -> list[Planned]:
    """Everything, or a tenth of it."""
    found: list[Planned] = []
    for rows in ROWS[:1] if quick else ROWS:
        for size in SHAPES[:1] if quick else SHAPES:
            found += _of(rows, *size)
    for form in ("int2", "int3", "int8", "float8", "nvfp4", "mxfp4"):
        for rows in (1,) if quick else (1, 16):
            found.append(_codes(f"{form} weights", form, rows, 14336, 4096))
    return found


def _of(rows: int, outputs: int, columns: int) -> list[Planned]:
    size = (rows, outputs, columns)
    found = [_codes(FOUR, "int4", *size), _other(BF16, 16, peers.bf16, *size)]
    if rows <= 64:
        found.append(_other(TORCH4, 4.25, peers.torch_int4, *size))
        found.append(_other(GEMLITE4, 4.25, peers.gemlite_int4, *size))
    if rows in (1, 16):
        found.append(_codes(SPARSE, "sparse4", *size))
    if rows == 16:
        found.append(_other("torch 2:4 bf16", 9, peers.torch_sparse, *size))
    if rows in (1, 16, 512, 2048):
        found.append(_bytes(EIGHT, F8, *size))
        found.append(_bytes("INT8 W8A8, rounding its inputs", torch.int8, *size))
    if rows >= 512:
        found.append(_bytes(EIGHT_BEFORE, F8, *size, before=True))
        found.append(_other(TORCH8, 8, peers.torch_fp8, *size))
        found.append(_bytes("INT8 W8A8, inputs rounded", torch.int8, *size, before=True))
        found.append(_other("torch _int_mm, inputs rounded", 8, peers.torch_int8, *size))
        found.append(_bytes("FP8 128x128, rounding its inputs", F8, *size, blocks=True))
    return found


def _other(method: str, bits: float, make: Callable[[Tensor, int, int], peers.Calls], *size: int) -> Planned:
    rows, outputs, columns = size
    return Planned(method, rows, outputs, columns, int(outputs * columns * bits / 8), make, None)


def _codes(method: str, form: str, rows: int, outputs: int, columns: int) -> Planned:
    name = "float4" if form.endswith("fp4") else form
    group, scale = {"nvfp4": (16, "e4m3"), "mxfp4": (32, "e8m0"), "float8": (0, "half")}.get(
        form, (peers.GROUP, "half")
    )
    case = CodesCase(name, rows, outputs, columns, group, B, scale)

    def make(x: Tensor, _: int, copies: int) -> peers.Calls:
        tile, first = case.tile_on(tiles_of(x.device)), case.packed(x.device)
        weights = [first, *(first.copied() for _ in range(copies - 1))]
        return [lambda w=w: linear_codes.linear_codes(x, w, tile) for w in weights]

    bits = case.bits + {"e4m3": 8, "e8m0": 8, "half": 16}[scale] / group if group else case.bits
    return Planned(method, rows, outputs, columns, int(outputs * columns * bits / 8), make, case)


def _bytes(
    method: str, code: torch.dtype, rows: int, outputs: int, columns: int, *, blocks: bool = False, before: bool = False
) -> Planned:
    case = BytesCase(code, rows, outputs, columns, blocks, rows <= 16, B)

    def make(x: Tensor, _: int, copies: int) -> peers.Calls:
        tile, first = case.tile_on(tiles_of(x.device)), case.packed(x.device)
        weights = [first, *(first.copied() for _ in range(copies - 1))]
        if not before:
            return [lambda w=w: linear_bytes.linear_bytes(x, w, tile, fused=case.fused) for w in weights]
        codes, scales = quantize_rows(x, code, by_block=blocks)
        return [lambda w=w: linear_bytes.multiply(codes, scales, w, tile, B) for w in weights]

    return Planned(method, rows, outputs, columns, outputs * columns, make, case)
