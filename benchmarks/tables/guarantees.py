"""Table of the items that guarantees need."""

from __future__ import annotations

from typing import Any

from .table import ResultsTable, markdown


def early_stop(results: Any) -> str:
    """Verdicts and items, by true loss."""
    head = ("claimed loss at most", "lost", "gained", "certified", "refuted", "undecided", "items, mean", "saved")
    rows = [
        (
            f"{row['limit']:.0%}", f"{row['lost']:.0%}", f"{row['gained']:.0%}",
            *(f"{row[verdict]:.1%}" for verdict in ("certified", "refuted", "undecided")),
            f"{row['mean_items']:,.0f}", f"{1 - row['mean_items'] / results['items']:.0%}",
        )
        for row in results["rows"]
    ]  # fmt: skip
    return (
        f"{results['draws']:,} simulated draws of {results['items']:,} items, {results['confidence']:.0%}; a model loses and gains items with these probabilities.\n\n"
        + markdown(head, rows)
    )


TABLES = {"early_stop": ResultsTable("early_stop", early_stop)}
