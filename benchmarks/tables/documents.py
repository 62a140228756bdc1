"""The documents that hold tables, and the marks between which they are written."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Protocol

from ..common import REPOSITORY, RESULTS
from . import (
    gpu,
    guarantees,
    parallel,
    predictions,
    pruning,
    quantization,
    runtime,
    server,
    serving,
    serving_on_engine,
    speculation,
    training,
)

PLACES = ("README.md", "benchmarks/README.md", *(f"docs/{p.name}" for p in sorted((REPOSITORY / "docs").glob("*.md"))))
_MARKED = re.compile(r"(<!-- results: ([^>]+) -->\n).*?(<!-- results end -->)", re.DOTALL)


class _Table(Protocol):
    def text(self, folder: Path) -> str: ...


TABLES: dict[str, _Table] = {
    **quantization.TABLES,
    **pruning.TABLES,
    **training.TABLES,
    **runtime.TABLES,
    **predictions.TABLES,
    **gpu.TABLES,
    **serving.TABLES,
    **server.TABLES,
    **serving_on_engine.TABLES,
    **parallel.TABLES,
    **speculation.TABLES,
    **guarantees.TABLES,
}


def text_of(name: str, folder: Path = RESULTS) -> str:
    """A table with its caption, or the sentence that nothing is measured.

    Raises:
        KeyError: no table has that name.
    """
    return TABLES[name].text(folder)


def filled(text: str, folder: Path = RESULTS) -> str:
    """A document with its tables as the results have them."""
    return _MARKED.sub(lambda found: f"{found[1]}{text_of(found[2], folder)}{found[3]}", text)


def main(doc: str | None) -> None:
    """Write the tables into all documents, or check them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the results files are")
    given = parser.parse_args()
    stale = []
    for name in PLACES:
        path = REPOSITORY / name
        before = path.read_text(encoding="utf-8")
        after = filled(before, given.results)
        if before != after:
            stale.append(name)
            if not given.check:
                path.write_text(after, encoding="utf-8")
    print(f"{'stale' if given.check else 'written'}: {', '.join(stale) or 'nothing'}")
    sys.exit(1 if given.check and stale else 0)
