"""What every benchmark shares: where data is, what machine this is, how results are kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
RESULTS = REPOSITORY / "benchmarks" / "results"
SMELT_6M = REPOSITORY / "models" / "builtin" / "smelt-6m"
SCRATCH = Path(tempfile.gettempdir()) / "smelt-benchmarks"  # models that are made once

# Files of the shared data folder; see :func:`shared`.
C4 = "data/calib/c4.utf8"
WIKITEXT_TRAIN = "data/text/wikitext2_train_raw_part.txt"
WIKITEXT_TEST = "data/text/wikitext2_test_unk.txt"
WIKITEXT_VALIDATION = "data/text/wikitext2_valid_unk.txt"
TINYSTORIES = "data/text/tinystories_1000.json"


def shared(name: str) -> Path:
    """A file of the shared data folder, which stands beside the repository; without it the script ends with a sentence."""
    path = SHARED / name
    if not path.exists():
        raise SystemExit(f"{path} is missing: this benchmark uses real text, which is not part of the repository")
    return path


def parser(about: str | None) -> argparse.ArgumentParser:
    """Of a script's options; ``about`` is its docstring, which ``--help`` shows instead of measuring."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_scratch(options: argparse.ArgumentParser) -> None:
    """``--scratch``: where models are made that the next run finds."""
    options.add_argument(
        "--scratch", type=Path, default=SCRATCH, help="where models are made and kept, %(default)s by default"
    )


def machine() -> dict[str, Any]:
    """This machine and the versions in use."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("smelt", "torch", "transformers", "compressed-tensors")},
    }


def saved(name: str) -> Any:
    """What ``benchmarks/results/NAME.json`` says was found, or nothing if nothing was measured yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else None


def save(name: str, command: str, results: Any) -> Path:
    """Write ``benchmarks/results/NAME.json`` with the command, the commit, the date and the machine."""
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    header = {"command": command, "date": _today(), "commit": commit, "machine": machine()}
    path.write_text(json.dumps({**header, "results": results}, indent=1) + "\n")
    return path


class ResultRows(list[dict[str, Any]]):
    """The rows of ``benchmarks/results/NAME.json``. Those that are there are not measured again, so that a run that was cut
    goes on; delete the file, or its rows, to start over.

    Args:
        name: of the file.
        command: that measures them.
        part: of the file's results whose rows these are, if it holds several lists.
    """

    def __init__(self, name: str, command: str, part: str | None = None) -> None:
        self._name, self._command, self._part = name, command, part
        path = RESULTS / f"{name}.json"
        file = json.loads(path.read_text()) if path.exists() else {"results": []}
        known = file["results"] if part is None else dict(file["results"]).get(part, [])
        super().__init__({"date": file["date"], **row} for row in known)

    def has(self, **fields: Any) -> bool:
        """Whether a row says this."""
        return any(all(row.get(name) == value for name, value in fields.items()) for row in self)

    def add(self, row: dict[str, Any]) -> None:
        """Print a row, date it, and write the file."""
        print(json.dumps(row), flush=True)
        self.append({**row, "date": _today()})
        save(self._name, self._command, self if self._part is None else {**(saved(self._name) or {}), self._part: self})


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
