"""Writes what a GPU measured into README and docs, between marks, from the results' files: never by hand.

python -m benchmarks.gpu.tables [--check]

A file that is marked with ``<!-- gpu: NAME -->`` and ``<!-- gpu end -->`` gets the table of that name. Where nothing has
been measured, it says so. ``--check`` changes nothing, and fails if something would.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import goals
from .goals import Rows
from .results import REPOSITORY, SHIPPED, Entry

PLACES = ("README.md", "docs/gpu.md", "docs/kernels.md", "benchmarks/README.md")
_MARKED = re.compile(r"(<!-- gpu: ([a-z ]+) -->\n).*?(<!-- gpu end -->)", re.DOTALL)


class Measured:
    """A stage's file, of the device that was measured last.

    Args:
        folder: where results are.
        stage: whose.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder = folder
        files = [json.loads(path.read_text()) for path in sorted(folder.glob(f"gpu_{stage}_*.json"))]
        whole = [each for each in files if not each.get("quick")]
        found: dict[str, Any] | None = max(whole, key=lambda each: each["date"], default=None)
        self.facts: dict[str, Any] = found or {}
        self.entries = [] if found is None else [Entry(**entry) for entry in found["entries"]]
        self.rows = Rows(self.entries)

    def caption(self) -> str:
        """What a table was taken with."""
        names = ("device", "torch", "triton", "commit", "date")
        facts = {name: self.facts.get(name) or "unknown" for name in names}
        lacking = "; ".join(self.facts.get("missing", []))
        said = "`{command}`, {device}, torch {torch}, Triton {triton}, commit {commit}, {date}".format(
            command=self.facts["command"], **facts
        )
        return f"{said}{f'. Missing: {lacking}' if lacking else ''}.\n"


def text_of(name: str, folder: Path) -> str:
    """A table, or the sentence that there is none.

    Raises:
        KeyError: no table is called so.
    """
    stage, table = TABLES[name]
    measured = Measured(folder, stage)
    if not measured.entries:
        said = f"Not measured yet: no GPU has run `benchmarks/gpu/run.sh {stage}`.\n"
        return f"{said}\n{_goals(measured)}" if name == "goals" else said
    return f"{measured.caption()}\n{table(measured)}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _goals(measured: Measured) -> str:
    def reached(goal: dict[str, Any]) -> tuple[str, str]:
        if goal["reached"] is None:
            return "not measured", ""
        met = goal["reached"] <= goal["wanted"] if goal["at_most"] else goal["reached"] >= goal["wanted"]
        return f"{goal['reached']:.3g}", "yes" if met else "no"

    serving = Measured(measured.folder, "serve")
    known = {goal["goal"]: goal for one in (measured, serving) for goal in one.facts.get("goals", [])}
    found = [known.get(goal["goal"], goal) for goal in goals.wanted()]
    rows = [(goal["goal"], f"{goal['wanted']:.3g}", *reached(goal)) for goal in found]
    return _table(("goal", "wanted", "reached", "met"), rows)


def _checks(measured: Measured) -> str:
    rows = []
    for part in dict.fromkeys(entry.part for entry in measured.entries):
        its = [entry for entry in measured.entries if entry.part == part]
        wrong = sum(bool(entry.problems) for entry in its)
        failed = sum(entry.state != "done" for entry in its)
        rows.append((part.replace("_", " "), str(len(its) - wrong - failed), str(wrong), str(failed)))
    return _table(("what", "right", "wrong", "did not end"), rows)


def _decode(measured: Measured) -> str:
    rows = []
    for row in measured.rows.of("decode"):
        if row.get("tokens_per_s"):
            seconds = row["batch"] / row["tokens_per_s"]
            copy = measured.rows.copy
            share = f"{row['weights_bytes'] / seconds / copy:.0%}" if copy else "-"
            name = row["format"] + (f", {row['cache']} cache" if row["cache"] != "auto" else "")
            rows.append((name, str(row["batch"]), f"{row['tokens_per_s']:.1f}", share))
    return _table(("Llama-3-8B, random weights", "sequences", "tokens/s", "weights alone, of the copy's rate"), rows)


def _profile(measured: Measured) -> str:
    rows = []
    for row in measured.rows.of("decode", format="w4a16", batch=1):
        if "step_us" in row:
            rows.append(("whole step", "", f"{row['step_us']:.1f}"))
            rows.append(("of it kernels", "", f"{row['busy_us']:.1f}"))
        if "kernel" in row:
            rows.append((f"`{row['kernel']}`", f"{row['launches']:g}", f"{row['microseconds']:.1f}"))
    return _table(("decode step, W4A16, one sequence", "launches", "us"), rows[:14])


def _linears(measured: Measured) -> str:
    rows = []
    for row in measured.rows.of("linears"):
        if row.get("microseconds") and row["rows"] in (1, 16, 64, 512):
            share = measured.rows.of_copy(row)
            matmul = measured.rows.matmul
            work = f"{row['operations'] / (row['microseconds'] * 1e-6) / matmul:.0%}" if matmul else "-"
            size = f"{row['rows']} x {row['columns']} by {row['outputs']}{', gate' if row['gate'] else ''}"
            rows.append((size, row["method"], f"{row['microseconds']:.1f}", f"{share:.0%}" if share else "-", work))
    return _table(("product", "method", "us", "of the copy's rate", "of the large product's"), rows)


def _attention(measured: Measured) -> str:
    rows = []
    for row in measured.rows.of("attention"):
        if not row.get("microseconds"):
            continue
        share = measured.rows.of_copy(row) if "bytes" in row else None
        speed = f"{share:.0%} of the copy's rate" if share else "-"
        if "operations" in row:
            speed = f"{row['operations'] / row['microseconds'] / 1e6:.0f} TFLOP/s"
        rows.append((f"{row['sequences']} x {row['length']}", row["method"], f"{row['microseconds']:.1f}", speed))
    return _table(("sequences x positions", "method", "us", "speed"), rows)


def _serving(measured: Measured) -> str:
    rows = [
        (row["model"], row["method"], f"{row['tokens_per_s']:.0f}", f"{row['seconds']:.1f}", str(row.get("note", "")))
        for row in measured.rows.of("serving")
        if row.get("tokens_per_s")
    ]
    return _table(("model", "256 ragged requests by", "tokens/s", "seconds", ""), rows)


TABLES: dict[str, tuple[str, Callable[[Measured], str]]] = {
    "checks": ("check", _checks),
    "goals": ("numbers", _goals),
    "decode": ("numbers", _decode),
    "profile": ("numbers", _profile),
    "linears": ("numbers", _linears),
    "attention": ("numbers", _attention),
    "serving": ("serve", _serving),
}


def filled(text: str, folder: Path) -> str:
    """A document with its tables as results have them."""
    return _MARKED.sub(lambda found: f"{found[1]}{text_of(found[2], folder)}{found[3]}", text)


def main() -> None:
    """Fill all documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=SHIPPED)
    given = parser.parse_args()
    stale = []
    for name in PLACES:
        path = REPOSITORY / name
        before = path.read_text()
        after = filled(before, given.results)
        if before != after:
            stale.append(name)
            if not given.check:
                path.write_text(after)
    print(f"{'stale' if given.check else 'written'}: {', '.join(stale) or 'nothing'}")
    sys.exit(1 if given.check and stale else 0)


if __name__ == "__main__":
    main()
