"""Tables of models on several processes, and of offload."""

from __future__ import annotations

from typing import Any

from .table import ResultsTable, markdown


def pipeline(results: Any) -> str:
    """Time and bubbles by how a step is cut."""
    return f"Medians of {results['turns']} turns.\n\n" + markdown(
        ("a step of", "pieces", "tokens", "ms", "predicted", "bubbles", "predicted"),
        (
            (
                row["load"], row["way"], ", ".join(map(str, _short(row["pieces"]))), f"{row['seconds'] * 1e3:.0f}",
                f"{row['predicted_seconds'] * 1e3:.0f}", f"{row['bubbles']:.0%}", f"{row['predicted_bubbles']:.0%}",
            )
            for row in results["rows"]
        ),
        left=3,
    )  # fmt: skip


def _short(pieces: list[int]) -> list[Any]:
    return [f"{len(pieces)} x {pieces[0]}"] if len(pieces) > 2 and len(set(pieces)) == 1 else pieces


def replicas(results: Any) -> str:
    """One replica and two, in a line."""
    medians, rates = results["medians"], results["rates"]
    return (
        f"{medians['1']:.0f} tokens/s of one process, {medians['2']:.0f} of two: {results['times']:.2f} times as many (medians of"
        f" {len(rates['1'])} turns; {min(rates['1']):.0f} to {max(rates['1']):.0f} and {min(rates['2']):.0f} to {max(rates['2']):.0f}).\n"
    )


def offload(results: Any) -> str:
    """In memory and from the disk."""
    lines = []
    for name, loads in results["medians"].items():
        for count, found in loads.items():
            streamed = "bandwidth" in found
            lines.append(
                (
                    name, count, f"{found['tokens_per_second']:.2f}", f"{found['bandwidth'] / 1e9:.2f}" if streamed else "-",
                    f"{found['predicted_bandwidth'] / 1e9:.2f}" if streamed else "-", f"{found['waiting']:.0%}" if streamed else "-",
                )
            )  # fmt: skip
    same = "the same tokens" if results["same_tokens"] else "OTHER TOKENS"
    return (
        f"{results['weights'] / 1e9:.2f} GB of weights, a limit of {results['limit'] / 1e9:.2f} GB on data memory; {same} as without a limit."
        f" Medians of {results['turns']} turns.\n\n"
        + markdown(("weights", "sequences", "tokens/s", "read, GB/s", "predicted, GB/s", "waiting"), lines)
    )


TABLES = {
    "pipeline": ResultsTable("pipeline", pipeline),
    "replicas": ResultsTable("replicas", replicas),
    "offload": ResultsTable("offload", offload),
}
