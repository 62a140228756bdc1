"""What all parts share: the device, options, and where results go."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """What a user chose.

    Attributes:
        quick: a tenth of the work, to see whether it runs.
        output: a folder.
        scratch: where models are written meanwhile; None for where temporary files go.
    """

    quick: bool
    output: Path
    scratch: Path | None


def options(what: str) -> Options:
    """Read the command line; end with a sentence if there is no GPU."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see whether it runs")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--scratch", type=Path, help="where random models are written meanwhile: 20 GB")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu needs a GPU, and torch sees none here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is set; unset it to run on the GPU")
    given.output.mkdir(parents=True, exist_ok=True)
    # Whoever is stopped, by run.sh for one, leaves no models behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    return Options(given.quick, given.output, given.scratch)


def needed(*packages: str) -> None:
    """End with a sentence if one of them is not here."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"not measured: this part needs {', '.join(missing)}, which this Python lacks; install it")


def facts() -> dict[str, Any]:
    """The device and versions that results were taken with."""
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "units": device.multi_processor_count,
        "memory_gb": round(device.total_memory / 1e9, 1),
        "cache_mb": round(device.L2_cache_size / 1e6, 1),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "python": sys.version.split()[0],
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _commit() -> str:
    try:
        command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""  # without git, or outside a clone


def told(goals: list[dict[str, Any]]) -> None:
    """Print goals with what was reached."""
    print(f"\n{'goal':<66}{'wanted':>8}{'reached':>9}")
    for goal in goals:
        reached = "-" if goal["reached"] is None else format(goal["reached"], ".2f")
        print(f"{goal['goal']:<66}{goal['wanted']:>8.2f}{reached:>9}")


def save(given: Options, part: str, results: Any) -> Path:
    """Write ``gpu_PART_DEVICE.json`` as a whole; a quick run has a file of its own."""
    from smelt.runtime.kernels.tile import file_name

    known = facts()
    path = given.output / f"gpu_{part}{'_quick' * given.quick}_{file_name(known['device'])}"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"command": "benchmarks/gpu/run.sh", **known, "results": results}, indent=1) + "\n")
    return partial.replace(path)


def one_line(error: Exception) -> str:
    """What went wrong, shortened."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
