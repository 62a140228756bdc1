"""Tables of what is predicted for an H100 and measured on none."""

from __future__ import annotations

from typing import Any

from .table import ResultsTable, markdown

_FORMATS = {
    "int4 g128 half": "W4 g128",
    "int4 g128 half zero": "W4 g128, zero-points",
    "int4 g32 half": "W4 g32",
    "int2 g128 half": "W2 g128",
    "int3 g128 half": "W3 g128",
    "int8 g128 half": "W8 g128",
    "sparse4 g128 half": "2:4 W4 g128",
    "float4 g16 e4m3": "NVFP4",
    "float4 g32 e8m0": "MXFP4",
    "float8 by row half": "FP8",
}
_SHAPE = " 1x4096 by 4096 bfloat16"


def instructions(results: Any) -> str:
    """What a weight costs in instructions, from the machine code of sm_90."""
    ours = [row for row in results if row["target"] == "sm_90" and row["kernel"] == "linear_codes"]
    known = {row["build"].replace(_SHAPE, ""): row for row in ours if _SHAPE in row["build"]}
    rows = [
        (
            label,
            f"{known[build]['bits_per_weight']:.3f}",
            f"{known[build]['instructions_per_weight']:.2f}",
            f"{known[build]['issue_share']:.0%}",
        )
        for build, label in _FORMATS.items()
    ]
    return markdown(("one row, bfloat16", "bits a weight", "instructions a weight", "issue slots"), rows)


def steps(results: Any) -> str:
    """A decode step of a whole model."""
    bandwidth = results["device"]["bandwidth"]
    rows = [
        (
            f"{row['model']}, {row['format']}",
            str(row["launches"]),
            f"{row['microseconds']:,.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['batch'] * bandwidth / row['memory_bytes']:.0f}",
        )
        for row in results["steps"]
    ]
    return markdown(
        ("predicted, not measured", "launches", "µs", "tokens/s", "tokens/s at the data sheet's bandwidth"), rows
    )


TABLES = {
    "instructions": ResultsTable("kernel_code", instructions),
    "predicted steps": ResultsTable("step_prediction", steps),
}
