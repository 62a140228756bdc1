"""What every benchmark shares: where data is, what machine this is, how results are saved."""

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
SCRATCH = Path(tempfile.gettempdir()) / "smelt-benchmarks"  # models that are made once


def parser(about: str | None) -> argparse.ArgumentParser:
    """Of a script's options; ``about`` is its docstring, which ``--help`` shows instead of measuring."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


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


def save(name: str, command: str, results: Any) -> Path:
    """Write ``benchmarks/results/NAME.json`` with the command, the commit, the date and the machine."""
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    header = {"command": command, "date": datetime.now(UTC).date().isoformat(), "commit": commit, "machine": machine()}
    path.write_text(json.dumps({**header, "results": results}, indent=1) + "\n")
    return path
