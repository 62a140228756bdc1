"""Claims of the papers on serving, simulated with Smelt's scheduler on predicted devices: docs/serving-study.md.

    python -m benchmarks.serving.study [--only CLAIM …] [--traces DIR]

Claims that are not run again keep their results.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from smelt.system.errors import SmeltError

from ..common import SHARED, parser, save, saved
from . import batching, chunking, layouts, memory, prefixes, queues, swaps
from .setting import Claim, Study

NAME = "serving_study"
CLAIMS: dict[str, Claim] = {
    "waste": memory.waste,
    "iterations": batching.iterations,
    "paging": memory.paging,
    "sharing": memory.sharing,
    "chunks": chunking.chunks,
    "feedback": queues.feedback,
    "equal_latency": queues.equal_latency,
    "turns": prefixes.turns,
    "mooncake": prefixes.mooncake,
    "swaps_predicted": swaps.predicted,
    "swaps_simulated": swaps.simulated,
    "disaggregation": layouts.disaggregation,
    "bubbles": layouts.bubbles,
    "multiplexing": layouts.multiplexing,
}


def main() -> int:
    """Run claims, and save their rows beside those that are there."""
    options = parser(__doc__)
    options.add_argument(
        "--only", nargs="+", choices=list(CLAIMS), default=list(CLAIMS), metavar="CLAIM", help=", ".join(CLAIMS)
    )
    options.add_argument("--traces", type=Path, default=SHARED / "data/traces", help="the folder of recorded traces")
    given = options.parse_args()
    study = Study(given.traces)
    known: dict[str, Any] = saved(NAME) or {}
    for name in given.only:
        begun = time.perf_counter()
        try:
            rows = CLAIMS[name](study)
        except SmeltError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {len(rows)} rows in {time.perf_counter() - begun:.0f} s", flush=True)
        known[name] = rows
        save(NAME, "python -m benchmarks.serving.study", {each: known[each] for each in CLAIMS if each in known})
    return 0


if __name__ == "__main__":
    sys.exit(main())
