"""What a second replica brings: two replicas of one thread each beside one process of one thread, on the same load, by turns.

    python -m benchmarks.server.replicas

A Llama of a billion weights in W4A16 (random ones), 32 clients that ask for whole answers of 32 tokens to prompts of 64. The clients run on
the same cores.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

from ..common import parser, save
from .overhead import LOADS, served, write_large

_LOAD = LOADS[1]


def main() -> None:
    """Run it."""
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=5)
    turns = options.parse_args().turns
    os.environ["OMP_NUM_THREADS"] = "1"
    rates: dict[str, list[float]] = {"1": [], "2": []}
    with tempfile.TemporaryDirectory() as scratch:
        model = write_large(Path(scratch) / "large")
        for _ in range(turns):
            for replicas, found in rates.items():
                options = ("--replicas", replicas) if replicas != "1" else ()
                found.append(served(str(model), _LOAD, False, *options)["tokens_per_second"])
            print({replicas: found[-1] for replicas, found in rates.items()}, flush=True)
    medians = {replicas: statistics.median(found) for replicas, found in rates.items()}
    results = {"medians": medians, "times": medians["2"] / medians["1"], "rates": rates}
    print(json.dumps(results, indent=1))
    print(save("replicas", "python -m benchmarks.server.replicas", results))


if __name__ == "__main__":
    main()
