"""One job by Smelt, measured in a process of its own; run by against_peers.py.

The time is that of the whole run: checks, tokenization, quantizing, writing, and reloading the result.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def peak() -> float:
    """Largest resident memory of this process so far, in MB (getrusage would count the parent's too)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def main() -> None:
    begun = time.perf_counter()
    from smelt.compress import Recipe
    from smelt.compress.pipeline.pipeline import run
    from smelt.models.structure.skeleton import Skeleton  # noqa: F401 - the modelling code, imported here to be counted as import

    imported, after_import = time.perf_counter(), peak()
    recipe = Recipe.load(Path(sys.argv[1]))
    start = time.perf_counter()
    run(recipe, fresh=True)
    print(
        json.dumps(
            {
                "quantize_seconds": round(time.perf_counter() - start, 2),
                "import_seconds": round(imported - begun, 2),
                "peak_mb": round(peak(), 1),
                "import_mb": round(after_import, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
