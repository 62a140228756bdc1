"""Tables of the server: what HTTP costs, other servers beside it, and the load test."""

from __future__ import annotations

from typing import Any

from .table import ResultsTable, markdown


def overhead(results: Any) -> str:
    """Each way beside the bare engine; medians."""
    return markdown(
        ("model", "", "first token of 1 client, ms", "of 8, ms", "tokens/s of many", "of the bare engine's"),
        (
            (
                f"{model} ({measured['many']} clients)", name, f"{found['first_p50_of_1'] * 1e3:.1f}",
                f"{found['first_p50_of_8'] * 1e3:.1f}", f"{found['tokens_per_second']:,.0f}", f"{found['throughput_of_bare']:.2f}",
            )
            for model, measured in results.items()
            for name, found in measured["medians"].items()
        ),
        left=2,
    )  # fmt: skip


def beside(results: Any) -> str:
    """Servers by how many requests they have at once; medians over turns."""
    return f"Medians of {results['turns']} turns.\n\n" + markdown(
        ("server", "at once", "tokens/s", "first token, ms", "between tokens, ms"),
        (
            (
                name, at_once, f"{found['tokens_per_second']:,.0f}", f"{found['first_token_ms']:.1f}",
                f"{found['between_tokens_ms']:.2f}",
            )
            for name, loads in results["medians"].items()
            for at_once, found in loads.items()
        ),
        left=1,
    )  # fmt: skip


def load(results: Any) -> str:
    """One run, in words."""
    idle, after = results["idle"], results["after"]
    return (
        f"{results['streams']} streams for {results['minutes']:g} minutes: {results['answered']:,} answers, {results['wrong_tokens']} of them with"
        f" other text than the engine alone; {results['left']} clients that left, {results['malformed']} malformed requests,"
        f" {results['problem_count']} unexpected statuses or errors. Afterwards {after['num_requests_running']:.0f} requests run and"
        f" {after['kv_cache_usage_perc']:.0%} of the cache is used; {after['descriptors']} descriptors are open ({idle['descriptors']} before the first"
        f" request); the median of memory in the last quarter was {results['growth'] / 1e6:+.1f} MB from that in the second.\n"
    )


TABLES = {
    "http overhead": ResultsTable("http_overhead", overhead),
    "http beside others": ResultsTable("http_beside_others", beside),
    "http load": ResultsTable("http_load", load),
}
