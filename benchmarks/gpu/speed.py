"""Part two: what each kernel takes, beside what the device's limits allow and what others take."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from smelt.runtime.kernels.precompile import precompile
from smelt.runtime.kernels.targets import target_of
from smelt.runtime.kernels.tile import tiles_of
from smelt.runtime.kernels.timing import copies_needed, copy_rate, device_lives, matmul_rate, seconds

from .common import one_line, options, save
from .plan import BF16, EIGHT, EIGHT_BEFORE, FOUR, GEMLITE4, SHAPES, SPARSE, TORCH4, TORCH8, Planned, plan

LIMIT_S = 165  # of the ten minutes that all parts may take


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
    planned = plan(given.quick)
    target = target_of(device)
    precompile([one.case.launch(target) for one in planned if one.case is not None], print)
    found: list[Row] = []
    reason = ""
    for one in planned:
        if not reason and time.monotonic() - start > LIMIT_S:
            reason = "out of time"
        found.append(_measured(one, device, copied, multiplied) if not reason else _absent(one, reason))
        print(_line(found[-1]), flush=True)
        if not reason and not device_lives():
            reason = "the device had stopped"
    goals = _goals(found)
    print(f"\n{'goal, worst over the shapes that were measured':<60}{'wanted':>8}{'reached':>9}  shapes")
    for goal in goals:
        reached = "-" if goal["reached"] is None else format(goal["reached"], ".2f")
        print(f"{goal['goal']:<60}{goal['wanted']:>8.2f}{reached:>9}  {goal['measured']} of {goal['of']}")
    limits = {"copy_bytes_per_s": copied, "matmul_per_s": multiplied, "tiles": tiles.told}
    path = save(given, "speed", {**limits, "rows": [asdict(row) for row in found], "goals": goals})
    print(f"\n{time.monotonic() - start:.0f} s: {path}")


def _measured(one: Planned, device: torch.device, copied: float, multiplied: float) -> Row:
    try:
        x = torch.randn(one.rows, one.columns, dtype=torch.bfloat16, device=device)
        taken = seconds(one.make(x, one.outputs, copies_needed(one.nbytes, device)))
    except Exception as error:
        return _absent(one, one_line(error))
    moved = one.nbytes + 2 * one.rows * (one.columns + one.outputs)
    done = 2 * one.rows * one.outputs * one.columns
    return Row(
        one.method, one.rows, one.outputs, one.columns, taken * 1e6, moved / taken / copied, done / taken / multiplied
    )


def _absent(one: Planned, why: str) -> Row:
    return Row(one.method, one.rows, one.outputs, one.columns, None, None, None, why)


def _goals(found: list[Row]) -> list[dict[str, Any]]:
    """The goals for an H100, each with the worst that any shape reached, and how many shapes that are."""
    times = {(r.method, r.rows, r.outputs, r.columns): r.microseconds for r in found}

    def ratio(ours: str, theirs: str, *rows: int) -> tuple[list[float], int]:
        pairs = [(times.get((ours, n, *size)), times.get((theirs, n, *size))) for n in rows for size in SHAPES]
        return [other / mine for mine, other in pairs if mine and other], len(pairs)

    def bandwidth(method: str, rows: int) -> tuple[list[float], int]:
        shares = [r.bandwidth for r in found if r.method == method and r.rows == rows and r.bandwidth]
        return shares, len(SHAPES)

    listed = [
        ("W4A16, 1 row: share of copy bandwidth", 0.85, bandwidth(FOUR, 1)),
        ("W4A16, 1 row: times torch int4", 1.2, ratio(FOUR, TORCH4, 1)),
        ("W4A16, 1 row: times gemlite", 1.2, ratio(FOUR, GEMLITE4, 1)),
        ("W4A16, 16 rows: share of copy bandwidth", 0.75, bandwidth(FOUR, 16)),
        ("W4A16, 16 rows: times bf16", 3.0, ratio(FOUR, BF16, 16)),
        ("W4A16, 64 rows: times bf16", 1.5, ratio(FOUR, BF16, 64)),
        ("W4A16, 512 rows and more: times bf16", 0.9, ratio(FOUR, BF16, 512, 2048)),
        ("FP8 W8A8, 512 rows and more: times _scaled_mm", 0.85, ratio(EIGHT_BEFORE, TORCH8, 512, 2048)),
        ("FP8 W8A8, 512 rows and more: times bf16", 1.4, ratio(EIGHT, BF16, 512, 2048)),
        ("2:4 W4A16, 1 row: times our dense W4A16", 1.2, ratio(SPARSE, FOUR, 1)),
    ]
    return [
        {"goal": goal, "wanted": wanted, "reached": min(values, default=None), "measured": len(values), "of": of}
        for goal, wanted, (values, of) in listed
    ]


def _line(row: Row) -> str:
    size = f"{row.rows:>5} x {row.columns:<6} by {row.outputs:<7}"
    if row.microseconds is None or row.bandwidth is None or row.compute is None:
        return f"{size}{row.method:<40} not measured: {row.why}"
    return (
        f"{size}{row.method:<40}{row.microseconds:>10.1f} us{row.bandwidth:>8.0%} of copy{row.compute:>7.0%} of matmul"
    )


if __name__ == "__main__":
    main()
