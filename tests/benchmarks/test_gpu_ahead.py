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

_STEPS = """
import sys, tempfile
from pathlib import Path
import torch
from tests.runtime.kernels.mock_device import mock_device
from tests.runtime.kernels.mock_driver import MockDriver
MockDriver().install()
from benchmarks.gpu.meta_model import executor_on_meta, meta_stands_for, tiles_are_of
from benchmarks.gpu.random_checkpoints import TINY, write
from smelt.runtime import Engine
from smelt.runtime.gpu import sampled_steps
from smelt.runtime.kernels.base.launch import noted
from smelt.runtime.kernels.base.precompile import identity
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.base.workspace import set_apart

def name(launch):
    return launch.function.__name__, *identity(launch)[1:]

engine, meta = set(), set()
limits = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 64}

def compiled(works, log):
    with noted(lambda launch: engine.add(name(launch))):
        for work in works:
            work()

sampled_steps.precompile_work = compiled
with tempfile.TemporaryDirectory() as folder, mock_device():
    path = write(Path(folder), TINY, "w4a16", torch.device("cpu"))
    Engine(path, device="cuda", dtype="bfloat16", kv_cache_dtype="int4", quiet=True, **limits)
    device = torch.cuda.get_device_name(0)
target = TARGETS["sm_90"]
with tiles_are_of(device), meta_stands_for(target), set_apart(), torch.inference_mode():
    executor = executor_on_meta(TINY, "w4a16", target, torch.int4, **limits)
    with noted(lambda launch: meta.add(name(launch))):
        for kind in executor._kinds.all():
            executor._steps.body(kind)
assert len(engine) > 20, len(engine)
assert engine == meta, engine ^ meta
"""


def _environment(folder: Path) -> dict[str, str]:
    (folder / "smelt").symlink_to(REPOSITORY)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return environment | {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": f"{folder}:{REPOSITORY}"}


@pytest.mark.slow
def test_an_engines_steps_are_those_that_are_compiled_ahead(tmp_path: Path) -> None:
    """On a device whose driver launches nothing; with that device's tiles."""
    subprocess.run([sys.executable, "-c", _STEPS], env=_environment(tmp_path), cwd=REPOSITORY, check=True)


@pytest.mark.slow
def test_launches_find_what_was_compiled_ahead(tmp_path: Path) -> None:
    """A share of two kernels; the driver of the launches is another."""
    cache, environment = tmp_path / "cache", _environment(tmp_path)
    cache.mkdir()
    ahead = [sys.executable, "-m", "benchmarks.gpu.ahead", str(cache), "--share", "0", _SHARES]
    subprocess.run(ahead, env=environment, cwd=REPOSITORY, check=True)
    compiled = {path.name for path in cache.iterdir()}
    assert len(compiled) >= 2
    subprocess.run([sys.executable, "-c", _LAUNCH], env=environment, cwd=REPOSITORY, check=True)
    assert {path.name for path in cache.iterdir()} == compiled
