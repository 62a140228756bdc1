"""Linears on a Llama-3-8B's shapes: our kernels, and what others have for the same products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from smelt.runtime.kernels.base.launch import overlapping_at
from smelt.runtime.kernels.base.precompile import precompile
from smelt.runtime.kernels.base.targets import target_of
from smelt.runtime.kernels.linear import linear_bytes, linear_codes
from smelt.runtime.kernels.linear.linear_bytes import BytesCase
from smelt.runtime.kernels.linear.linear_codes import CodesCase
from smelt.runtime.kernels.linear.linear_dense import DenseCase, linear_dense
from smelt.runtime.kernels.rows.quantize_rows import quantize_rows
from smelt.runtime.kernels.tiles.tile import Tile, tiles_of
from torch import Tensor

from .. import peers
from ..goals import BF16, FOUR
from ..job import Job, Row
from ..place import Place
from ..worker import one_line

# Outputs, columns and gate as the engine multiplies them: query, key and value; out; gate and inputs; down; head. And what
# papers measure.
ENGINE = ((6144, 4096, ""), (4096, 4096, ""), (28672, 4096, "silu"), (4096, 14336, ""), (128256, 4096, ""))
SHAPES = (*ENGINE, (14336, 4096, ""))
ROWS = (1, 16, 64, 512, 4, 2048)
SPARSE, DENSE = "2:4 W4A16 g128", "linear_dense bf16"
TORCH4, GEMLITE4 = "torch int4 g128", "gemlite int4 g128"
EIGHT, EIGHT_BEFORE = "FP8 W8A8", "FP8 W8A8, inputs rounded"
TORCH8 = "torch _scaled_mm e4m3, inputs rounded"
B, F8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Planned:
    """One measurement to be made.

    Attributes:
        method: what it is called.
        rows, outputs, columns, gate: the product; outputs are the weight's rows, also where a gate halves them.
        nbytes: of its weight, scales included.
        make: from inputs and a number of copies of the weight, as many calls.
        case: what of ours is to be compiled before; None for others'.
    """

    method: str
    rows: int
    outputs: int
    columns: int
    gate: str
    nbytes: int
    make: Callable[[Tensor, int, int], peers.Calls]
    case: CodesCase | BytesCase | DenseCase | None

    @property
    def key(self) -> str:
        """Its name."""
        gated = f", gate {self.gate}" if self.gate else ""
        return f"{self.method}, {self.rows} x {self.columns} by {self.outputs}{gated}"


def jobs(place: Place) -> list[Job]:
    """One each, after a job that compiles all of ours."""
    found, tiles = plan(place), tiles_of(place.device)

    def about(one: Planned) -> dict[str, Any]:
        tile: Tile | None = None if one.case is None else one.case.tile_on(tiles)
        names = ("method", "rows", "outputs", "columns", "gate")
        return {name: getattr(one, name) for name in names} | ({} if tile is None else {"tile": vars(tile)})

    measuring = [Job(one.key, partial(_measured, one), about(one), limit_s=30) for one in found]
    compiling = Job("compile", partial(_compiled, found), {"tiles": [job.about.get("tile") for job in measuring]}, 150)
    return [compiling, *measuring]


def _compiled(planned: list[Planned], place: Place) -> Iterator[Row]:
    target = target_of(place.device)
    messages = list[str]()
    if not place.rehearses:
        for rows in {one.rows for one in planned}:
            with overlapping_at(rows):
                ours = [one.case.launch(target) for one in planned if one.case is not None and one.rows == rows]
                precompile(ours, messages.append)
    yield {"message": messages[-1] if messages else ""}


def _measured(one: Planned, place: Place) -> Iterator[Row]:
    x = torch.randn(one.rows, one.columns, dtype=B, device=place.device)
    try:
        with overlapping_at(one.rows):
            taken = place.seconds(one.make(x, one.outputs, place.copies(one.nbytes)))
    except (NotImplementedError, RuntimeError) as error:
        if one.case is not None or not place.alive():
            raise
        yield {"not_measured": one_line(error)}  # others' operators do not take every shape
        return
    outputs = one.outputs // 2 if one.gate else one.outputs
    yield {
        "microseconds": taken * 1e6,
        "bytes": one.nbytes + 2 * one.rows * (one.columns + outputs),
        "operations": 2 * one.rows * one.outputs * one.columns,
    }


def plan(place: Place) -> list[Planned]:
    """Everything, the most important first; or a tenth of it."""
    if place.rehearses:
        return [
            one for one in _of(1, 128, 256, "") + _of(512, 128, 256, "") if one.case is not None or one.method == BF16
        ]
    found = [
        one
        for rows in (ROWS[:1] if place.quick else ROWS)
        for size in (SHAPES[:1] if place.quick else SHAPES)
        for one in _of(rows, *size)
    ]
    for form in ("int2", "int3", "int8", "float8", "nvfp4", "mxfp4"):
        found += [_codes(f"{form} weights", form, rows, 14336, 4096) for rows in ((1,) if place.quick else (1, 16))]
    return found


def _of(rows: int, outputs: int, columns: int, gate: str) -> list[Planned]:
    size = (rows, outputs, columns)
    found = [_codes(FOUR, "int4", *size, gate)]
    if rows <= 64:
        found.append(_dense(*size, gate))
    if rows in (1, 16, 512, 2048):
        found.append(_bytes(EIGHT, F8, *size, gate))
        found.append(_bytes(EIGHT_BEFORE, F8, *size, gate, before=True))
        found.append(_bytes("INT8 W8A8, inputs rounded", torch.int8, *size, gate, before=True))
    # The plain product is what others have; where a gate follows, that is all of it but the activation.
    found.append(_other(BF16, 16, peers.bf16, *size, gate))
    if rows <= 64:
        found.append(_other(TORCH4, 4.25, peers.torch_int4, *size, gate))
    if rows <= 64 and find_spec("gemlite") is not None:
        found.append(_other(GEMLITE4, 4.25, peers.gemlite_int4, *size, gate))
    if gate:
        return found
    if rows in (1, 16):
        found.append(_codes(SPARSE, "sparse4", *size))
    if rows == 16:
        found.append(_other("torch 2:4 bf16", 9, peers.torch_sparse, *size))
    if rows >= 512:
        found.append(_other(TORCH8, 8, peers.torch_fp8, *size))
        found.append(_other("torch _int_mm, inputs rounded", 8, peers.torch_int8, *size))
        found.append(_bytes("FP8 128x128", F8, *size, blocks=True))
    return found


def _other(
    method: str,
    bits: float,
    make: Callable[[Tensor, int, int], peers.Calls],
    rows: int,
    outputs: int,
    columns: int,
    gate: str = "",
) -> Planned:
    return Planned(method, rows, outputs, columns, gate, int(outputs * columns * bits / 8), make, None)


def _dense(rows: int, outputs: int, columns: int, gate: str) -> Planned:
    case = DenseCase(rows, outputs, columns, B, gate or "none")

    def make(x: Tensor, _: int, copies: int) -> peers.Calls:
        tile, first = case.tile_on(tiles_of(x.device)), case.packed(x.device)
        weights = [first, *(first.copied() for _ in range(copies - 1))]
        return [lambda w=w: linear_dense(x, w, tile) for w in weights]

    return Planned(DENSE, rows, outputs, columns, gate, 2 * outputs * columns, make, case)


def _codes(method: str, form: str, rows: int, outputs: int, columns: int, gate: str = "") -> Planned:
    name = "float4" if form.endswith("fp4") else form
    group, scale = {"nvfp4": (16, "e4m3"), "mxfp4": (32, "e8m0"), "float8": (0, "half")}.get(
        form, (peers.GROUP, "half")
    )
    case = CodesCase(name, rows, outputs, columns, group, B, scale, gate=gate or "none")

    def make(x: Tensor, _: int, copies: int) -> peers.Calls:
        tile, first = case.tile_on(tiles_of(x.device)), case.packed(x.device)
        weights = [first, *(first.copied() for _ in range(copies - 1))]
        return [lambda w=w: linear_codes.linear_codes(x, w, tile) for w in weights]

    bits = case.bits + {"e4m3": 8, "e8m0": 8, "half": 16}[scale] / group if group else case.bits
    return Planned(method, rows, outputs, columns, gate, int(outputs * columns * bits / 8), make, case)


def _bytes(
    method: str,
    code: torch.dtype,
    rows: int,
    outputs: int,
    columns: int,
    gate: str = "",
    *,
    blocks: bool = False,
    before: bool = False,
) -> Planned:
    case = BytesCase(code, rows, outputs, columns, blocks, B, gate or "none")

    def make(x: Tensor, _: int, copies: int) -> peers.Calls:
        tile, first = case.tile_on(tiles_of(x.device)), case.packed(x.device)
        weights = [first, *(first.copied() for _ in range(copies - 1))]
        if not before:
            return [lambda w=w: linear_bytes.linear_bytes(x, w, tile) for w in weights]
        codes, scales = quantize_rows(x, code, by_block=blocks)
        return [lambda w=w: linear_bytes.multiply(codes, scales, w, tile, B) for w in weights]

    return Planned(method, rows, outputs, columns, gate, outputs * columns, make, case)
