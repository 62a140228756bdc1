"""Tables of the study of serving on the real engine: what was measured, and what the simulator predicts of the same runs."""

from __future__ import annotations

from typing import Any

from .serving import ClaimTable
from .table import markdown

_FILE = "serving_on_engine"
_WHOLE = "prefill_first, 4,096"


def memory(rows: Any) -> str:
    """Waste and throughput; the ratio is to reserved maxima scheduled by iteration."""
    base = {row["load"]: row for row in rows if row["way"] == "iteration-level, reserved"}
    return markdown(
        ("lengths", "scheme", "wasted", "predicted", "sequences", "predicted", "tokens/s", "predicted", "ratio", "predicted"),
        (
            (
                row["load"], row["way"], *_both(row, "waste", ".1%"), *_both(row, "running", ".0f"), *_both(row, "output_rate", ",.0f"),
                *_ratios(row, base[row["load"]], "output_rate", more=True),
            )
            for row in rows
        ),
        left=2,
    )  # fmt: skip


def iterations(rows: Any) -> str:
    """Static batches beside iteration-level scheduling, in one line."""
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    return markdown(
        ("outputs", "static, tokens/s", "predicted", "iteration-level", "predicted", "ratio", "predicted"),
        (
            (
                f"`{static['load']}`", *_both(static, "output_rate", ",.0f"), *_both(orca, "output_rate", ",.0f"),
                *_ratios(orca, static, "output_rate", more=True),
            )
            for static, orca in pairs
        ),
    )  # fmt: skip


def chunks(rows: Any) -> str:
    """Throughput of a saturated engine, and latencies below."""
    saturated = {(row["load"].split(", saturated")[0], row["way"]): row for row in rows if "saturated" in row["load"]}
    loaded = {(row["load"].rsplit(", ", 1)[0], row["way"]): row for row in rows if (row["load"].endswith("load"))}
    return markdown(
        ("load", "policy, budget", "tokens/s", "predicted", "p99 TBT, ms", "predicted", "better by", "predicted", "mean TTFT, ms", "predicted"),
        (
            (
                load, way, *_both(full, "output_rate", ",.0f"), *_both(loaded[load, way], "p99_between", ".1f", 1e3),
                *_ratios(loaded[load, way], loaded[load, _WHOLE], "p99_between", more=False),
                *_both(loaded[load, way], "mean_first", ".0f", 1e3),
            )
            for (load, way), full in saturated.items()
        ),
        left=2,
    )  # fmt: skip


def feedback(rows: Any) -> str:
    """Latencies beside those of first come, first served."""
    base = {row["load"]: row for row in rows if row["way"] == "fcfs"}
    return markdown(
        ("load", "policy", "mean completion, ms", "predicted", "better by", "predicted", "p99 per token, ms (five runs)", "predicted", "better by", "predicted", "preemptions", "predicted"),
        (
            (
                row["load"], row["way"], *_both(row, "mean_completion", ",.0f", 1e3),
                *_ratios(row, base[row["load"]], "mean_completion", more=False),
                _of_runs(row, "p99_normalized"), f"{1e3 * row['predicted']['p99_normalized']:.1f}", *_ratios(row, base[row["load"]], "p99_normalized", more=False),
                *_both(row, "preemptions", ".0f"),
            )
            for row in rows
        ),
        left=2,
    )  # fmt: skip


def sharing(rows: Any) -> str:
    """Blocks saved by samples and beams, beside counts without a model."""
    return markdown(
        ("lengths", "sequences", "saved", "counted without a model"),
        (
            (row["load"], row["way"], f"{row['measured']:.1%}", " to ".join(f"{each:.1%}" for each in row["predicted"]))
            for row in rows
        ),
        left=2,
    )  # fmt: skip


def swaps(rows: Any) -> str:
    """Milliseconds of both ways, and from which length on swapping takes less, by transfer size."""
    lines = []
    for block in dict.fromkeys(row["block"] for row in rows):
        mine = [row for row in rows if row["block"] == block]
        shown = [row for row in mine if row["tokens"] in (16, 128, 1000)]
        lines.append(
            (
                f"{block}", f"{mine[0]['transfer_bytes'] / 1e3:.0f}",
                *(f"{1e3 * row['recompute']:.2f}, {1e3 * row['swap']:.2f}" for row in shown), _crossover(mine, ""), _crossover(mine, "predicted_"),
            )
        )  # fmt: skip
    return markdown(
        (
            "block",
            "transfer, kB",
            "16 tokens: again, swapped, ms",
            "128 tokens",
            "1,000 tokens",
            "swaps from",
            "by measured copies",
        ),
        lines,
    )


def _crossover(rows: Any, which: str) -> str:
    cheaper = [row["tokens"] for row in rows if row[f"{which}swap"] < row[f"{which}recompute"]]
    if not cheaper:
        return "never"
    # Shorter ones were not tried.
    return f"≤ {min(cheaper):,}" if min(cheaper) == rows[0]["tokens"] else f"{min(cheaper):,}"


def _both(row: Any, figure: str, form: str, scale: float = 1.0) -> tuple[str, str]:
    return f"{scale * row['measured'][figure]:{form}}", f"{scale * row['predicted'][figure]:{form}}"


def _of_runs(row: Any, figure: str) -> str:
    """The median, and the least and the most, in milliseconds."""
    middle, least, most = (1e3 * row[kind][figure] for kind in ("measured", "least", "most"))
    return f"{middle:.1f} ({least:.1f} to {most:.1f})"


def _ratios(row: Any, base: Any, figure: str, *, more: bool) -> tuple[str, str]:
    """How many times better than ``base``, where more is better or less."""
    measured, predicted = (row[kind][figure] / base[kind][figure] for kind in ("measured", "predicted"))
    return f"{measured if more else 1 / measured:.2f}", f"{predicted if more else 1 / predicted:.2f}"


TABLES = {
    "engine memory": ClaimTable("memory", memory, _FILE),
    "engine sharing": ClaimTable("sharing", sharing, _FILE),
    "engine iterations": ClaimTable("iterations", iterations, _FILE),
    "engine chunks": ClaimTable("chunks", chunks, _FILE),
    "engine feedback": ClaimTable("feedback", feedback, _FILE),
    "engine swaps": ClaimTable("swaps", swaps, _FILE),
}
