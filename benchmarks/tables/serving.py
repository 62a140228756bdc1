"""Tables of the study of serving: what the papers say, and what the simulator says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .table import ResultsTable, markdown

_FILE = "serving_study"
_DEVICES = {"a100-sxm-80gb": "A100", "h100-sxm": "H100"}
_TRANSFERS = {64_000: "64 kB", 500_000: "0.5 MB", 2_000_000: "2 MB"}


@dataclass(frozen=True)
class ClaimTable:
    """A table of one claim's rows.

    Attributes:
        claim: its name in the results.
        rows: makes the lines.
        file: of the results.
    """

    claim: str
    rows: Callable[[Any], str]
    file: str = _FILE

    def text(self, folder: Path) -> str:
        """The caption and the table, or a sentence that there is no such file."""
        return ResultsTable(self.file, lambda results: self.rows(results[self.claim])).text(folder)


def waste(rows: Any) -> str:
    """Shares of the cache by who holds it."""
    return markdown(
        ("lengths", "scheme", "block", "paper: wasted", "ours: wasted", "of that, filled later", "sequences", "tokens/s"),
        (
            (
                row["load"], row["way"], f"{row['block']:,}", row["paper"], f"{row['waste']:.1%}",
                _part(row["later"], row["later"] + row["never"]), f"{row['running']:.0f}", f"{row['output_rate']:,.0f}",
            )
            for row in rows
        ),
        left=2,
    )  # fmt: skip


def _part(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def iterations(rows: Any) -> str:
    """By the variation of output lengths."""
    return markdown(
        ("outputs", "places", "coefficient of variation", "static, tokens/s", "iteration-level", "ratio"),
        (
            (
                f"`{row['outputs']}`", f"{row['places']}", f"{row['variation']:.2f}", f"{row['static_rate']:,.0f}",
                f"{row['orca_rate']:,.0f}", f"{row['ratio']:.2f}",
            )
            for row in rows
        ),
    )  # fmt: skip


def paging(rows: Any) -> str:
    """Reserved maxima and blocks, in equal memory."""
    return markdown(
        ("lengths", "paper", "reserved, tokens/s", "blocks of 16", "ratio", "sequences", "preemptions"),
        (
            (
                row["load"], row["paper"], f"{row['reserved_rate']:,.0f}", f"{row['paged_rate']:,.0f}", f"{row['ratio']:.2f}",
                f"{row['reserved_running']:.0f}, {row['paged_running']:.0f}", f"{row['preemptions']:,}",
            )
            for row in rows
        ),
    )  # fmt: skip


def sharing(rows: Any) -> str:
    """Blocks saved by four sequences of one prompt."""
    beams = ("beams, a tenth of the steps", "beams, each step")
    return markdown(
        ("lengths", "paper: samples", "ours: 4 samples", "paper: beams", *(f"ours: 4 {name}" for name in beams)),
        (
            (row["load"], row["paper"], f"{row['samples']:.1%}", row["paper_beams"], *(f"{row[name]:.1%}" for name in beams))
            for row in rows
        ),
    )  # fmt: skip


def chunks(rows: Any) -> str:
    """Pauses and throughput by policy and budget, beside whole prompts first."""
    lines = []
    for row in rows:
        base = next(each for each in rows if each["load"] == row["load"])
        full = f"{row['full'] / row['saturated']:.1%} of {row['saturated']:,}" if row["saturated"] >= 100 else "few"
        lines.append(
            (
                row["load"], f"{row['policy']}, {row['budget']:,}", f"{1e3 * row['p99_between']:.0f}",
                f"{base['p99_between'] / row['p99_between']:.1f}", f"{row['output_rate']:,.0f}",
                f"{row['output_rate'] / base['output_rate']:.2f}", f"{row['mean_first']:.2f}",
                f"{row['mean_completion']:.1f}", full if row["policy"] in ("fcfs", "sarathi") else "",
            )
        )  # fmt: skip
    head = (
        "load", "policy, budget", "p99 TBT, ms", "better by", "tokens/s", "ratio", "mean TTFT, s", "mean completion, s",
        "full steps of saturated ones",
    )  # fmt: skip
    return markdown(head, lines, left=2)


def feedback(rows: Any) -> str:
    """Latencies of queues beside those of first come, first served."""
    lines = []
    for row in rows:
        base = next(each for each in rows if (each["load"], each["busy"]) == (row["load"], row["busy"]))
        lines.append(
            (
                row["load"], _way(row), f"{row['busy']:.0%}", f"{row['mean_completion']:.1f}",
                f"{base['mean_completion'] / row['mean_completion']:.2f}", f"{row['p99_completion']:.0f}",
                f"{1e3 * row['p99_normalized']:,.0f}", f"{base['p99_normalized'] / row['p99_normalized']:.2f}",
                f"{row['output_rate']:,.0f}", f"{row['preemptions']:,}",
            )
        )  # fmt: skip
    head = (
        "outputs", "policy", "load", "mean completion, s", "better by", "p99 completion, s", "p99 per token, ms", "better by",
        "tokens/s", "preemptions",
    )  # fmt: skip
    return markdown(head, lines, left=2)


def _way(row: dict[str, Any]) -> str:
    return f"{row['policy']}, host memory" if row["host"] else row["policy"]


def equal_latency(rows: Any) -> str:
    """The highest rates within limits."""
    base = rows[0]
    return markdown(
        ("policy", "requests/s at a mean of 30 ms per token", "ratio", "requests/s at a p99 of 100 ms per token", "ratio"),
        (
            (_way(row), *(cell for name in ("mean_rate", "p99_rate") for cell in (f"{row[name]:.2f}", _ratio(row[name], base[name]))))
            for row in rows
        ),
    )  # fmt: skip


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "none before"


def turns(rows: Any) -> str:
    """A session's later turns."""
    base = rows[0]
    return markdown(
        (
            "cache", "prompt tokens found", "computed of the eighth turn's", "its mean TTFT, s", "better by",
            "p99 TTFT of turns 2 to 8, s", "blocks copied",
        ),
        (
            (
                row["way"], f"{row['cached_share']:.1%}", f"{row['computed_last']:,.0f} of {row['prompt_last']:,}",
                f"{row['first_token_last']:.3f}", f"{base['first_token_last'] / row['first_token_last']:.1f}",
                f"{row['p99_later']:.2f}", f"{row['swapped_blocks']:,}",
            )
            for row in rows
        ),
    )  # fmt: skip


def mooncake(rows: Any) -> str:
    """Hit rates on the recorded trace."""
    return markdown(
        ("cache", "blocks of 512, in host memory", "paper", "prompt tokens found", "mean TTFT, s", "p99 TTFT, s", "time in steps"),
        (
            (
                row["way"], _blocks(row), row["paper"], f"{row['cached_share']:.1%}",
                *((f"{row['first_token']:.2f}", f"{row['p99_first']:.2f}", f"{row['busy']:.0%}") if "busy" in row else ("", "", "")),
            )
            for row in rows
        ),
    )  # fmt: skip


def _blocks(row: dict[str, Any]) -> str:
    return f"{row['cache_blocks']:,}, {row['host_blocks']:,}" if "cache_blocks" in row else ""


def swaps_predicted(rows: Any) -> str:
    """Times and crossovers by transfer size."""
    return markdown(
        (
            "model, device", "1,024 tokens again, ms", *(f"swapped in {name}" for name in _TRANSFERS.values()),
            *(f"swaps from, {name}" for name in _TRANSFERS.values()),
        ),
        (
            (
                f"{row['model']}, {_DEVICES[row['device']]}", f"{1e3 * row['again_1024']:.1f}",
                *(f"{1e3 * row[f'swap_1024_{size}']:.1f}" for size in _TRANSFERS),
                *(f"{row[f'from_{size}']:,}" if row[f"from_{size}"] else "never" for size in _TRANSFERS),
            )
            for row in rows
        ),
    )  # fmt: skip


def swaps_simulated(rows: Any) -> str:
    """Throughput of a load that preempts."""
    return markdown(
        ("model, prompt", "transfer", "recompute, tokens/s", "swap", "ratio", "auto", "of its preemptions, swapped"),
        (
            (
                f"{row['model']}, {row['prompt']:,}", _TRANSFERS[row["transfer"]], f"{row['recompute_rate']:,.0f}",
                f"{row['swap_rate']:,.0f}", f"{row['swap_rate'] / row['recompute_rate']:.2f}", f"{row['auto_rate']:,.0f}",
                f"{row['auto_swaps']:,} of {row['auto_preemptions']:,}",
            )
            for row in rows
        ),
    )  # fmt: skip


def disaggregation(rows: Any) -> str:
    """Goodput by placement and limits; the best in bold."""
    limits = list(rows[0]["goodput"])
    lines = []
    for row in rows:
        same = [each["goodput"] for each in rows if each["load"] == row["load"]]
        cells = []
        for name in limits:
            value, best = row["goodput"][name], max(each[name] for each in same)
            cells.append(f"**{value:.1f}**" if value == best > 0 else f"{value:.1f}")
        lines.append((row["load"], f"{row['placement']}, {row['policy']} {row['budget']:,}", *cells))
    heads = (f"{name}: {first:g} s, {1e3 * between:g} ms" for name, (first, between) in rows[0]["limits"].items())
    return markdown(("load", "placement, policy and budget", *heads), lines, left=2)


def bubbles(rows: Any) -> str:
    """Idle shares of stages."""
    lines = []
    for row in rows:
        base = next(each for each in rows if (each["load"], each["stages"]) == (row["load"], row["stages"]))
        lines.append(
            (
                row["load"], f"{row['policy']}, {row['budget']:,}", f"{row['stages']}", f"{row['bubbles']:.1%}",
                f"{base['bubbles'] / row['bubbles']:.2f}", f"{row['output_rate']:,.0f}",
                f"{row['output_rate'] / base['output_rate']:.2f}",
            )
        )  # fmt: skip
    return markdown(("load", "policy, budget", "stages", "bubbles", "fewer by", "tokens/s", "ratio"), lines, left=2)


def multiplexing(rows: Any) -> str:
    """Mean completion of dedicated and of split models."""
    return markdown(
        ("load", "variation of pauses", "requests/s, each", "dedicated, mean s", "split", "ratio", "ratio of p99"),
        (
            (
                row["load"], f"{row['burstiness']:g}", f"{row['arrivals']:.1f}", f"{row['dedicated']:.2f}",
                f"{row['split']:.2f}", f"{row['ratio']:.2f}", f"{row['ratio_p99']:.2f}",
            )
            for row in rows
        ),
    )  # fmt: skip


TABLES = {
    "serving waste": ClaimTable("waste", waste),
    "serving iterations": ClaimTable("iterations", iterations),
    "serving paging": ClaimTable("paging", paging),
    "serving sharing": ClaimTable("sharing", sharing),
    "serving chunks": ClaimTable("chunks", chunks),
    "serving feedback": ClaimTable("feedback", feedback),
    "serving equal latency": ClaimTable("equal_latency", equal_latency),
    "serving turns": ClaimTable("turns", turns),
    "serving mooncake": ClaimTable("mooncake", mooncake),
    "serving swaps, predicted": ClaimTable("swaps_predicted", swaps_predicted),
    "serving swaps, simulated": ClaimTable("swaps_simulated", swaps_simulated),
    "serving disaggregation": ClaimTable("disaggregation", disaggregation),
    "serving bubbles": ClaimTable("bubbles", bubbles),
    "serving multiplexing": ClaimTable("multiplexing", multiplexing),
}
