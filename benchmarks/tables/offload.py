"""The table of offload: a model of four times the memory."""

from __future__ import annotations

from typing import Any

from .table import ResultsTable, markdown


def offload(results: Any) -> str:
    """Both ways, by how many sequences at once; medians."""
    same = "The same tokens" if results["same_tokens"] else "**Other tokens**"
    words = (
        f"{results['weights'] / 1e9:.1f} GB of bfloat16 weights, {results['limit'] / 1e9:.1f} GB of data memory (RLIMIT_DATA, the libraries' included), of which"
        f" {results['anonymous_memory'] / 1e9:.2f} GB were used. {same} as without a limit; without offload the limited process refuses the model.\n\n"
    )
    rows = []
    for name, loads in results["medians"].items():
        for count, found in loads.items():
            read = [f"{found[key] / 1e9:.2f}" if key in found else "" for key in ("bandwidth", "predicted_bandwidth")]
            waiting = f"{found['waiting']:.0%}" if "waiting" in found else ""
            rows.append((name, count, f"{found['tokens_per_second']:.2f}", *read, waiting))
    return words + markdown(("", "at once", "tokens/s", "read, GB/s", "predicted, GB/s", "of the time waiting"), rows)


TABLES = {"offload": ResultsTable("offload", offload)}
