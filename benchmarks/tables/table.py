"""What a table is made of: a results file, its caption, and numbers as they are shown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ResultsTable:
    """A table that one results file decides.

    Attributes:
        file: its name under ``benchmarks/results``, without ``.json``.
        rows: makes the lines, from the file's ``results``.
    """

    file: str
    rows: Callable[[Any], str]

    def text(self, folder: Path) -> str:
        """The caption and the table, or a sentence that there is no such file."""
        path = folder / f"{self.file}.json"
        if not path.exists():
            return f"Not measured: there is no `benchmarks/results/{self.file}.json`.\n"
        known = json.loads(path.read_text())
        return f"{caption(known)}\n\n{self.rows(known['results'])}"


def caption(known: dict[str, Any]) -> str:
    """The command, the machine and the date behind a results file."""
    machine = known["machine"]
    dates = sorted({*_dates(known["results"])} or {known["date"]})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"`{known['command']}`, {machine['cores']} cores of an {machine['cpu']}, {when}:"


def _dates(results: Any) -> Iterator[str]:
    """When rows were measured, where they say so: scripts that go on keep older ones."""
    if isinstance(results, dict) and isinstance(results.get("date"), str):
        yield results["date"]
    elif isinstance(results, dict | list):
        for each in results.values() if isinstance(results, dict) else results:
            yield from _dates(each)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first columns hold words, the others numbers."""
    rule = [*["---"] * left, *["---:"] * (len(head) - left)]
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, rule, *rows))


def spread(values: Sequence[float], digits: int) -> str:
    """The mean and the standard deviation over seeds; the mean alone where seeds change nothing."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) < 2 or max(values) == min(values):
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def grouped(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The rows by the values of some keys, in order."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def each(rows: Iterable[dict[str, Any]], key: str) -> list[float]:
    """One number of every row."""
    return [row[key] for row in rows]
