"""Tables of what a GPU measured; where none has, they say so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..gpu import goals
from ..gpu.goals import MeasuredRows
from ..gpu.results import Entry
from .table import markdown


def _measured(data: dict[str, Any]) -> tuple[int, str]:
    """How many jobs a file has, so that one of another device with few of them hides none; then its date."""
    return sum(entry.get("state") == "done" for entry in data["entries"]), data["date"]


class MeasuredStage:
    """A stage's file, of the device of which most was measured.

    Args:
        folder: where results are.
        stage: whose.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder = folder
        files = [json.loads(path.read_text()) for path in sorted(folder.glob(f"gpu_{stage}_*.json"))]
        whole = [each for each in files if not each.get("quick")]
        found: dict[str, Any] | None = max(whole, key=_measured, default=None)
        self.facts: dict[str, Any] = found or {}
        self.entries = [] if found is None else [Entry(**entry) for entry in found["entries"]]
        self.rows = MeasuredRows(self.entries)

    def caption(self) -> str:
        """What a table was taken with."""
        names = ("device", "torch", "triton", "date")
        facts = {name: self.facts.get(name) or "unknown" for name in names}
        lacking = "; ".join(self.facts.get("missing", []))
        commits = Counter(entry.commit or self.facts.get("commit") or "unknown" for entry in self.entries)
        said = "`{command}`, {device}, torch {torch}, Triton {triton}, {date}, commit{s} {commits}".format(
            command=self.facts["command"],
            s="s" if len(commits) > 1 else "",
            commits=", ".join(name for name, _ in commits.most_common()),
            **facts,
        )
        return f"{said}{f'. Missing: {lacking}' if lacking else ''}.\n"


@dataclass(frozen=True)
class GpuTable:
    """A table that a stage of ``benchmarks/gpu/run.sh`` decides.

    Attributes:
        stage: whose results.
        rows: makes the lines.
    """

    stage: str
    rows: Callable[[MeasuredStage], str]

    def text(self, folder: Path) -> str:
        """The caption and the table, or the sentence that there is none."""
        measured = MeasuredStage(folder, self.stage)
        if not measured.entries:
            said = f"Not measured yet: no GPU has run `benchmarks/gpu/run.sh {self.stage}`.\n"
            return f"{said}\n{_goals(measured)}" if self.rows is _goals else said
        return f"{measured.caption()}\n{self.rows(measured)}"


def _goals(measured: MeasuredStage) -> str:
    def reached(goal: dict[str, Any]) -> tuple[str, str]:
        if goal["reached"] is None:
            return "not measured", ""
        met = goal["reached"] <= goal["wanted"] if goal["at_most"] else goal["reached"] >= goal["wanted"]
        return f"{goal['reached']:.3g}", "yes" if met else "no"

    serving = MeasuredStage(measured.folder, "serve")
    known = {goal["goal"]: goal for one in (measured, serving) for goal in one.facts.get("goals", [])}
    found = [known.get(goal["goal"], goal) for goal in goals.wanted()]
    rows = [(goal["goal"], f"{goal['wanted']:.3g}", *reached(goal)) for goal in found]
    return markdown(("goal", "wanted", "reached", "met"), rows)


def _checks(measured: MeasuredStage) -> str:
    rows = []
    for part in dict.fromkeys(entry.part for entry in measured.entries):
        its = [entry for entry in measured.entries if entry.part == part]
        wrong = sum(bool(entry.problems) for entry in its)
        failed = sum(entry.state != "done" for entry in its)
        rows.append((part.replace("_", " "), str(len(its) - wrong - failed), str(wrong), str(failed)))
    return markdown(("what", "right", "wrong", "did not end"), rows)


def _decode(measured: MeasuredStage) -> str:
    rows = []
    for row in measured.rows.of("decode"):
        if row.get("tokens_per_s"):
            seconds = row["batch"] / row["tokens_per_s"]
            copy = measured.rows.copy
            share = f"{row['weights_bytes'] / seconds / copy:.0%}" if copy else "-"
            name = row["format"] + (f", {row['cache']} cache" if row["cache"] != "auto" else "")
            rows.append((name, str(row["batch"]), f"{row['tokens_per_s']:.1f}", share))
    return markdown(("Llama-3-8B, random weights", "sequences", "tokens/s", "weights alone, of the copy's rate"), rows)


def _profile(measured: MeasuredStage) -> str:
    rows = []
    for row in measured.rows.of("decode", format="w4a16", batch=1):
        if "step_us" in row:
            rows.append(("whole step", "", f"{row['step_us']:.1f}"))
            rows.append(("of it kernels", "", f"{row['busy_us']:.1f}"))
        if "kernel" in row:
            grid = f", {row['grid']} programs" if row.get("grid") else ""
            rows.append((f"`{row['kernel']}`{grid}", f"{row['launches']:g}", f"{row['microseconds']:.1f}"))
    return markdown(("decode step, W4A16, one sequence", "launches", "us"), rows[:14])


def _linears(measured: MeasuredStage) -> str:
    rows = []
    for row in measured.rows.of("linears"):
        if row.get("microseconds") and row["rows"] in (1, 16, 64, 512):
            share = measured.rows.of_copy(row)
            matmul = measured.rows.matmul
            work = f"{row['operations'] / (row['microseconds'] * 1e-6) / matmul:.0%}" if matmul else "-"
            size = f"{row['rows']} x {row['columns']} by {row['outputs']}{', gate' if row['gate'] else ''}"
            rows.append((size, row["method"], f"{row['microseconds']:.1f}", f"{share:.0%}" if share else "-", work))
    return markdown(("product", "method", "us", "of the copy's rate", "of the large product's"), rows)


def _attention(measured: MeasuredStage) -> str:
    rows = []
    for row in measured.rows.of("attention"):
        if not row.get("microseconds"):
            continue
        share = measured.rows.of_copy(row) if "bytes" in row else None
        speed = f"{share:.0%} of the copy's rate" if share else "-"
        if "operations" in row:
            speed = f"{row['operations'] / row['microseconds'] / 1e6:.0f} TFLOP/s"
        rows.append((f"{row['sequences']} x {row['length']}", row["method"], f"{row['microseconds']:.1f}", speed))
    return markdown(("sequences x positions", "method", "us", "speed"), rows)


def _serving(measured: MeasuredStage) -> str:
    rows = [
        (row["model"], row["method"], f"{row['tokens_per_s']:.0f}", f"{row['seconds']:.1f}", str(row.get("note", "")))
        for row in measured.rows.of("serving")
        if row.get("tokens_per_s")
    ]
    return markdown(("model", "256 ragged requests by", "tokens/s", "seconds", ""), rows)


TABLES = {
    "gpu checks": GpuTable("check", _checks),
    "gpu goals": GpuTable("numbers", _goals),
    "gpu decode": GpuTable("numbers", _decode),
    "gpu profile": GpuTable("numbers", _profile),
    "gpu linears": GpuTable("numbers", _linears),
    "gpu attention": GpuTable("numbers", _attention),
    "gpu serving": GpuTable("serve", _serving),
}
