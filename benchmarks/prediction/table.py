"""Predictions for people, and beside what was measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .device import GpuFigures
from .step import Prediction

_TERMS = ("gap", "start", "memory", "l2", "issue", "chain", "tensor", "tail")
_US = 1e6


def report(one: Prediction, device: GpuFigures) -> str:
    """A step, launch by launch: microseconds of one, and of all alike."""
    lines = [
        f"\n{headline(one)}",
        f"{'':46}{'count':>6}{'programs':>9}{'MB':>8}" + "".join(f"{name:>8}" for name in _TERMS) + f"{'µs':>9}"
        f"{'all, µs':>9}{'share':>7}  bound by",
    ]
    for row in one.rows:
        all_of_them = row.count * row.seconds
        lines.append(
            f"{row.label[:45]:<46}{row.count:>6}{row.programs:>9}{row.memory / 1e6:>8.1f}"
            + "".join(f"{getattr(row.terms, name) * _US:>8.2f}" for name in _TERMS)
            + f"{row.seconds * _US:>9.2f}{all_of_them * _US:>9.0f}{all_of_them / one.seconds:>7.1%}  {row.terms.bound}"
        )
    overlapped = sum(row.count * getattr(row.terms, row.terms.bound) for row in one.rows)
    outside = {name: sum(row.count * getattr(row.terms, name) for row in one.rows) for name in ("gap", "start", "tail")}
    parts = ", ".join(f"{name} {seconds * _US:.0f}" for name, seconds in outside.items())
    floor = one.memory / device.bandwidth
    lines.append(
        f"{one.seconds * _US:.0f} µs: {overlapped * _US:.0f} of bytes, instructions or operations, {parts},"
        f" {device.between_steps * _US:.0f} to the next step; its {one.memory / 1e9:.2f} GB at the data sheet's"
        f" bandwidth would take {floor * _US:.0f}"
    )
    return "\n".join(lines)


def headline(one: Prediction) -> str:
    """A step in one line."""
    asked = one.asked
    return (
        f"{asked.size.name}, {asked.stored}, batch {asked.sequences}, context {asked.context}, {asked.cache} cache:"
        f" {one.launches} launches, {one.seconds * _US:.0f} µs, {one.tokens_per_second:.0f} tokens/s (predicted)"
    )


def as_json(one: Prediction) -> dict[str, Any]:
    """For a file: microseconds."""
    asked = one.asked
    return {
        "model": asked.size.name,
        "format": asked.stored,
        "batch": asked.sequences,
        "context": asked.context,
        "cache": asked.cache,
        "predicted_not_measured": True,
        "launches": one.launches,
        "microseconds": round(one.seconds * _US, 1),
        "tokens_per_second": round(one.tokens_per_second, 1),
        "memory_bytes": one.memory,
        "rows": [
            {
                "kernel": row.kernel,
                "label": row.label,
                "launches": row.count,
                "microseconds": round(row.count * row.seconds * _US, 2),
                "programs": row.programs,
                "memory_bytes": row.memory,
                "bound": row.terms.bound,
                "terms": {name: round(value * _US, 3) for name, value in asdict(row.terms).items()},
                "code": None
                if row.costs is None
                else {
                    "registers": row.costs.registers,
                    "shared": row.costs.shared,
                    "residents": row.costs.residents,
                    "before": row.costs.before,
                    "loop": row.costs.main.length if row.costs.main else 0,
                    "after": row.costs.after,
                },
            }
            for row in one.rows
        ],
    }


def measured_rows(path: Path, one: Prediction) -> list[dict[str, Any]]:
    """Of a file, rows with a kernel's name and its microseconds in a step; of those that say whose they are, this step's.

    Raises:
        ValueError: the file has none.
    """
    found = [row for row in _rows_in(json.loads(path.read_text()), {}) if _fits(row, one)]
    if not found:
        raise ValueError(
            f"{path} has no rows with 'kernel', 'launches' and 'microseconds' for: {headline(one).partition(':')[0]}"
        )
    return found


def _rows_in(value: Any, around: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for part in value:
            yield from _rows_in(part, around)
    elif isinstance(value, dict):
        here = around | {key: part for key, part in value.items() if not isinstance(part, (dict, list))}
        if "kernel" in value and "microseconds" in value:
            yield here
            return
        for part in value.values():
            yield from _rows_in(part, here)


def _fits(row: dict[str, Any], one: Prediction) -> bool:
    asked = one.asked
    own = {
        "model": asked.size.name,
        "format": asked.stored,
        "batch": asked.sequences,
        "context": asked.context,
        "cache": asked.cache,
    }
    return all(row.get(key, value) == value for key, value in own.items())


def beside(one: Prediction, measured: list[dict[str, Any]]) -> str:
    """Predicted and measured, kernel by kernel, what is furthest apart first.

    A profiler's times are those inside of kernels; the gaps between them are a line of their own.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0, 0.0])
    for row in one.rows:
        both = sums[_plain(row.kernel)]
        both[0] += row.count
        both[1] += row.count * (row.seconds - row.terms.gap) * _US
    for row in measured:
        both = sums[_plain(row["kernel"])]
        both[2] += row.get("launches", 0)
        both[3] += row["microseconds"]
    lines = [
        f"\n{headline(one)}",
        f"{'':34}{'launches':>9}{'predicted, µs':>15}{'launches':>10}{'measured, µs':>14}{'measured/predicted':>20}",
    ]
    apart = sorted(sums.items(), key=lambda item: -abs(item[1][3] - item[1][1]))
    total = [sum(both[i] for both in sums.values()) for i in range(4)]
    gaps = one.seconds * _US - total[1]
    lines_of = [*apart, ("all kernels", total), ("gaps, and to the next step", [one.launches, gaps, 0, 0.0])]
    for name, (count, predicted, seen, microseconds) in lines_of:
        ratio = f"{microseconds / predicted:.2f}" if predicted and microseconds else "-"
        lines.append(f"{name[:33]:<34}{count:>9.0f}{predicted:>15.1f}{seen:>10.0f}{microseconds:>14.1f}{ratio:>20}")
    return "\n".join(lines)


def _plain(kernel: str) -> str:
    """A kernel's name without what compilers and profilers put around it; torch's own are one."""
    name = kernel.strip("_")
    return "torch" if name.startswith(("torch", "void", "at::")) else name
