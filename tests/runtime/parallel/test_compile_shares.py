"""What a rank of a divided model launches compiles for every kind of GPU, ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from smelt.runtime.kernels.base.targets import TARGETS


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["none", "W4A16", "FP8_DYNAMIC"])
def test_the_kernels_of_shares_compile(scheme: str) -> None:
    # Triton in interpreter mode compiles nothing, and the mode is fixed per process.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.parallel.compile_shares", scheme, "2", "8"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["target"], row["failed"]) for row in rows] == [(name, []) for _ in range(2) for name in TARGETS]
    assert all(row["compiled"] >= 8 for row in rows)
