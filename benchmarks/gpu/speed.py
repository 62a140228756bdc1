"""Part two: what each kernel takes, beside what the device's limits allow and what others take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from smelt.runtime.kernels import linear_bytes, linear_codes
from smelt.runtime.kernels.linear_bytes import BytesCase
from smelt.runtime.kernels.linear_codes import CodesCase
from smelt.runtime.kernels.quantize_rows import quantize_rows
from smelt.runtime.kernels.tile import tiles_of
from smelt.runtime.kernels.timing import copies_needed, copy_rate, matmul_rate, seconds

from . import peers
from .common import facts, options, save

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # outputs and columns of Llama-3-8B
LIMIT_S = 240  # of the nine minutes that both parts may take
B = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        method, rows, outputs, columns: what.
        microseconds: the median; None if it was not measured.
        bandwidth: the share of the copy's rate at which weight, inputs and outputs were moved.
        compute: the share of the large product's rate.
        why: for what was not measured.
    """

    method: str
    rows: int
    outputs: int
    columns: int
    microseconds: float | None
    bandwidth: float | None
    compute: float | None
    why: str = ""


def main() -> None:
    """Measure, print the table and the goals, save."""
    given = options(__doc__ or "")
    device, start = torch.device("cuda"), time.monotonic()
    copied, multiplied = copy_rate(device), matmul_rate(device)
    tiles = tiles_of(device)
    print(
        f"{torch.cuda.get_device_name()}: copies at {copied / 1e12:.2f} TB/s, bfloat16 products at {multiplied / 1e12:.0f} TFLOP/s"
    )
    print(f"tiles: {tiles.told}\n")
    found: list[Row] = []
    for method, nbytes, calls, rows, outputs, columns in _plan(given.quick):
        if time.monotonic() - start > LIMIT_S:
            found.append(Row(method, rows, outputs, columns, None, None, None, "out of time"))
            continue
        x = torch.randn(rows, columns, dtype=B, device=device)
        try:
            made = calls(x, outputs, copies_needed(nbytes, device))
            taken = seconds(made)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            found.append(Row(method, rows, outputs, columns, None, None, None, reason))
        else:
            moved = nbytes + 2 * rows * (columns + outputs)
            share, done = moved / taken / copied, 2 * rows * outputs * columns / taken / multiplied
            found.append(Row(method, rows, outputs, columns, taken * 1e6, share, done))
            del made
        torch.cuda.empty_cache()
        print(_line(found[-1]), flush=True)
    goals = _goals(found)
    print("\ngoal, worst over the shapes")
    for goal in goals:
        print(
            f"  {goal['goal']:<58}{goal['wanted']:>7.2f}  {'not measured' if goal['reached'] is None else format(goal['reached'], '.2f')}"
        )
    limits = {"copy_bytes_per_s": copied, "matmul_per_s": multiplied, "tiles": tiles.told}
    path = save(given.output, "speed", {**limits, "rows": [asdict(row) for row in found], "goals": goals})
    print(f"\n{facts()['device']}, {time.monotonic() - start:.0f} s: {path}")


Maker = Callable[[torch.Tensor, int, int], peers.Calls]


def _plan(quick: bool) -> list[tuple[str, int, Maker, int, int, int]]:
    """What to measure: method, bytes of its weight, how to make its calls, and the size."""
    plan: list[tuple[str, int, Maker, int, int, int]] = []
    shapes = SHAPES[:1] if quick else SHAPES

    def add(method: str, bits: float, make: Maker, rows: int, size: tuple[int, int]) -> None:
        plan.append((method, int(size[0] * size[1] * bits / 8), make, rows, *size))

    for size in shapes:
        for rows in (1, 512) if quick else (1, 4, 16, 64, 512, 2048):
            add("W4A16 g128", 4.125, _codes("int4"), rows, size)
            add("torch bf16", 16, peers.bf16, rows, size)
            if rows <= 64:
                add("torch int4 g128", 4.25, peers.torch_int4, rows, size)
                add("gemlite int4 g128", 4.125, peers.gemlite_int4, rows, size)
            if rows in (1, 16):
                add("2:4 W4A16 g128", 3.125, _codes("sparse4"), rows, size)
            if rows in (1, 16, 512, 2048):
                add("FP8 W8A8, rounding its inputs", 8, _bytes(torch.float8_e4m3fn), rows, size)
                add("INT8 W8A8, rounding its inputs", 8, _bytes(torch.int8), rows, size)
            if rows >= 512:
                add("FP8 W8A8, inputs rounded", 8, _bytes(torch.float8_e4m3fn, before=True), rows, size)
                add("FP8 128x128, rounding its inputs", 8, _bytes(torch.float8_e4m3fn, blocks=True), rows, size)
                add("INT8 W8A8, inputs rounded", 8, _bytes(torch.int8, before=True), rows, size)
                add("torch _scaled_mm e4m3, inputs rounded", 8, peers.torch_fp8, rows, size)
                add("torch _int_mm, inputs rounded", 8, peers.torch_int8, rows, size)
        add("torch 2:4 bf16", 9, peers.torch_sparse, 16, size)
    for form, bits in (
        ("int2", 2.125),
        ("int3", 3.125),
        ("int8", 8.125),
        ("float8", 8),
        ("float4 nv", 4.5),
        ("float4 mx", 4.25),
    ):
        for rows in (1, 16):
            add(f"W{form} weights", bits, _codes(form), rows, (14336, 4096))
    return plan


def _codes(form: str) -> Maker:
    name, kind = [*form.split(), ""][:2]
    group, scale = {"nv": (16, "e4m3"), "mx": (32, "e8m0")}.get(kind, (0 if name == "float8" else peers.GROUP, "half"))

    def make(x: torch.Tensor, outputs: int, copies: int) -> peers.Calls:
        case = CodesCase(name, x.shape[0], outputs, x.shape[1], group, B, scale)
        tile, first = case.tile_on(tiles_of(x.device)), case.packed(x.device)
        weights = [first.copied() for _ in range(copies)]
        return [lambda w=w: linear_codes.linear_codes(x, w, tile) for w in weights]

    return make


def _bytes(code: torch.dtype, blocks: bool = False, before: bool = False) -> Maker:
    def make(x: torch.Tensor, outputs: int, copies: int) -> peers.Calls:
        case = BytesCase(code, x.shape[0], outputs, x.shape[1], blocks, x.shape[0] <= 16, B)
        tile, first = case.tile_on(tiles_of(x.device)), case.packed(x.device)
        weights = [first.copied() for _ in range(copies)]
        if not before:
            return [lambda w=w: linear_bytes.linear_bytes(x, w, tile, fused=case.fused) for w in weights]
        codes, scales = quantize_rows(x, code, by_block=blocks)
        return [lambda w=w: linear_bytes.multiply(codes, scales, w, tile, B) for w in weights]

    return make


def _goals(found: list[Row]) -> list[dict[str, Any]]:
    """The goals for an H100, each with the worst that any shape reached."""
    times = {(r.method, r.rows, r.outputs, r.columns): r for r in found}

    def ratio(ours: str, theirs: str, rows: tuple[int, ...]) -> float | None:
        shares = [
            float(other.microseconds) / row.microseconds
            for (method, count, n, k), row in times.items()
            if method == ours
            and count in rows
            and row.microseconds
            and (other := times.get((theirs, count, n, k))) is not None
            and other.microseconds
        ]
        return min(shares, default=None)

    def bandwidth(method: str, rows: int) -> float | None:
        return min((r.bandwidth for r in found if r.method == method and r.rows == rows and r.bandwidth), default=None)

    four, eight = "W4A16 g128", "FP8 W8A8, inputs rounded"
    listed = [
        ("W4A16, 1 row: share of copy bandwidth", 0.85, bandwidth(four, 1)),
        ("W4A16, 1 row: times torch int4", 1.2, ratio(four, "torch int4 g128", (1,))),
        ("W4A16, 1 row: times gemlite", 1.2, ratio(four, "gemlite int4 g128", (1,))),
        ("W4A16, 16 rows: share of copy bandwidth", 0.75, bandwidth(four, 16)),
        ("W4A16, 16 rows: times bf16", 3.0, ratio(four, "torch bf16", (16,))),
        ("W4A16, 64 rows: times bf16", 1.5, ratio(four, "torch bf16", (64,))),
        ("W4A16, 512 rows and more: times bf16", 0.9, ratio(four, "torch bf16", (512, 2048))),
        (
            "FP8 W8A8, 512 rows and more: times _scaled_mm",
            0.85,
            ratio(eight, "torch _scaled_mm e4m3, inputs rounded", (512, 2048)),
        ),
        (
            "FP8 W8A8, 512 rows and more: times bf16",
            1.4,
            ratio("FP8 W8A8, rounding its inputs", "torch bf16", (512, 2048)),
        ),
        ("2:4 W4A16, 1 row: times our dense W4A16", 1.2, ratio("2:4 W4A16 g128", four, (1,))),
    ]
    return [{"goal": goal, "wanted": wanted, "reached": reached} for goal, wanted, reached in listed]


def _line(row: Row) -> str:
    size = f"{row.rows:>5} x {row.columns:<6} by {row.outputs:<7}"
    if row.microseconds is None or row.bandwidth is None or row.compute is None:
        return f"{size}{row.method:<40} not measured: {row.why}"
    return (
        f"{size}{row.method:<40}{row.microseconds:>10.1f} us{row.bandwidth:>8.0%} of copy{row.compute:>7.0%} of matmul"
    )


if __name__ == "__main__":
    main()
