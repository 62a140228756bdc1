"""What is compiled here is what a launch on a GPU asks its cache for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.results import REPOSITORY

_SHARES = "480"
_LAUNCH = f"""
from tests.runtime.kernels.mock_driver import MockDriver
MockDriver().install()
from benchmarks.gpu.ahead import wanted
from smelt.runtime.kernels.base.launch import overlapping
from smelt.runtime.kernels.base.targets import TARGETS
for launch, overlapped in wanted(TARGETS["sm_90"])[0 :: {_SHARES}]:
    with overlapping(overlapped):
        launch.warm()
"""


@pytest.mark.slow
def test_launches_find_what_was_compiled_ahead(tmp_path: Path) -> None:
    """A share of two kernels; the driver of the launches is another."""
    (tmp_path / "smelt").symlink_to(REPOSITORY)
    cache = tmp_path / "cache"
    cache.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    ahead = [sys.executable, "-m", "benchmarks.gpu.ahead", str(cache), "--share", "0", _SHARES]
    subprocess.run(ahead, env=environment, cwd=REPOSITORY, check=True)
    compiled = {path.name for path in cache.iterdir()}
    assert len(compiled) >= 2
    subprocess.run([sys.executable, "-c", _LAUNCH], env=environment, cwd=REPOSITORY, check=True)
    assert {path.name for path in cache.iterdir()} == compiled
