"""Linears of codes, or whole models, with this checkout beside another one: the time that they take, and whether they give the same bits or tokens.

    git worktree add /tmp/other COMMIT
    python -m benchmarks.cpu.two_checkouts --other /tmp/other [--turns 5] [--rows 1 2 3 4 5 6 8 16 64] [--results NAME]
    python -m benchmarks.cpu.two_checkouts --other /tmp/other --checkpoints W4A16=DIRECTORY... [--turns 5] [--results NAME]

Both take turns, each turn in a process of its own, and in every other turn this one comes first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..common import REPOSITORY, parser, save

KERNELS, MODELS = (Path(__file__).with_name(f"{name}_times.py") for name in ("kernel", "model"))
ROWS = (1, 2, 3, 4, 5, 6, 8, 16, 64)


def turn(checkout: Path, worker: Path, arguments: list[str]) -> dict[str, Any]:
    """What the worker finds with one checkout."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "smelt").symlink_to(checkout.resolve())
        done = subprocess.run(
            [sys.executable, str(worker), *arguments],
            env=os.environ | {"PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"with {checkout} it ended with status {done.returncode}")
    return json.loads(done.stdout)


def main() -> None:
    """Measure, print, and keep."""
    options = parser(__doc__)
    options.add_argument("--other", type=Path, required=True, help="another checkout of this repository")
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options.add_argument(
        "--checkpoints", nargs="+", metavar="NAME=DIRECTORY", help="measure these models instead of linears"
    )
    options.add_argument(
        "--results", default="two_checkouts", help="file in benchmarks/results, %(default)s by default"
    )
    given = options.parse_args()
    if not (given.other / "runtime" / "native").is_dir():
        raise SystemExit(f"{given.other} is no checkout of this repository: it has no runtime/native")
    commit = subprocess.run(
        ["git", "-C", str(given.other), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    worker, arguments = KERNELS, [str(count) for count in given.rows]
    measured = f"--rows {' '.join(arguments)}"
    if given.checkpoints:
        if wrong := [each for each in given.checkpoints if "=" not in each]:
            raise SystemExit(f"--checkpoints {wrong[0]} is not NAME=DIRECTORY")
        worker, arguments = MODELS, given.checkpoints
        measured = f"--checkpoints {' '.join(each.partition('=')[0] + '=DIRECTORY' for each in arguments)}"
    ours, theirs = [], []
    for number in range(given.turns):
        # Who comes second may get other pages.
        both = [(REPOSITORY, ours), (given.other, theirs)]
        for checkout, found in both if number % 2 else both[::-1]:
            found.append(turn(checkout, worker, arguments))
        print(f"turn {number + 1} of {given.turns}", flush=True)
    same = len({found["digest"] for found in ours + theirs}) == 1
    rows = []
    for i, first in enumerate(ours[0]["times"]):
        ratios = [a["times"][i]["seconds"] / b["times"][i]["seconds"] for a, b in zip(ours, theirs, strict=True)]
        milliseconds = statistics.median(found["times"][i]["seconds"] for found in ours) * 1e3
        row = {key: value for key, value in first.items() if key != "seconds"}
        rows.append({**row, "ratio": round(statistics.median(ratios), 3), "milliseconds": round(milliseconds, 3)})
        print(rows[-1])
    print("the same results" if same else "results DIFFER")
    command = f"python -m benchmarks.cpu.two_checkouts --other CHECKOUT {measured} --turns {given.turns} --results {given.results}"
    save(given.results, command, {"other": commit, "turns": given.turns, "same_bits": same, "rows": rows})


if __name__ == "__main__":
    main()
