"""Whether two versions of Smelt write the same checkpoints, byte for byte, and the same reports: for refactorings.

    python -m benchmarks.same_bytes --output before.json
    python -m benchmarks.same_bytes --compare before.json after.json

The first command runs each recipe of recipes.py on a small model, in a process of its own and with one thread, and keeps a digest of each file, tensor and
field that came out. Given again with the same output, it does what is missing. The second says what differs.

Nothing of Smelt is imported: only its command line is used. So it measures other versions, too: with PYTHONPATH
at another checkout. What must vary (times, speeds, memory, versions, the machine) is left out of a report's digest.
Numbers on different machines differ in their last bits; compare results of one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from .comparing import compare
from .recipes import RECIPES
from .running import run_all


def main() -> int:
    """Run what is asked for, or compare two results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the digests go")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(RECIPES), help="run these recipes alone")
    parser.add_argument("--scratch", type=Path, help="keep what is written in this directory")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="say what differs between two outputs")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*(json.loads(path.read_text()) for path in arguments.compare))
    if arguments.output is None:
        parser.error("--output or --compare is needed")
    names = arguments.only or list(RECIPES)
    if arguments.scratch is not None:
        return run_all(names, arguments.output, arguments.scratch.resolve())
    with tempfile.TemporaryDirectory(prefix="same-bytes-") as scratch:
        return run_all(names, arguments.output, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
