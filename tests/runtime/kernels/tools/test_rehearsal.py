"""All cases of all kernels, and whole engines, up to the launch: on a machine without a GPU, with Triton's real JIT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from smelt.runtime.kernels.tools.registry import KERNELS

from .test_check import ENVIRONMENT

ROOT = Path(__file__).parents[4]
# Two kernels have other names than their files, or several.
FUNCTIONS = {kernel.name for kernel in KERNELS} - {"sample_tokens"} | {"logit_statistics", "choose_tokens"}


def rehearsed(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.runtime.kernels.rehearsal", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--all"]], ids=["some", "all"])
def test_no_case_leaves_a_python_error_for_a_gpu_to_find(options: list[str]) -> None:
    found = rehearsed("cases", *options)
    assert found["failures"] == []
    assert found["alone"] == 0  # all launches overlap
    # Only all cases have a short context whose parts another launch merges.
    assert set(found["launched"]) - {"merge"} == FUNCTIONS


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], pytest.param(["--all"], marks=pytest.mark.slow)], ids=["one", "all"])
def test_no_engine_leaves_a_python_error_for_a_gpu_to_find(options: list[str]) -> None:
    found = rehearsed("steps", *options)
    assert found["failures"] == []
    assert found["alone"] == 0  # all launches overlap
    assert {"linear_codes", "attend_tokens", "attend_prompts", "choose_tokens"} <= set(found["launched"])


REFUSED = """
import torch
from dataclasses import replace
from smelt.runtime.kernels.linear.linear_dense import DenseCase
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.tiles.tile import Tile
from tests.runtime.kernels.mock_device import CUDA, mock_device
from tests.runtime.kernels.mock_driver import MockDriver

def attempt(work):
    try:
        work()
        print("nothing")
    except (AssertionError, RuntimeError, TypeError) as error:
        print(error)

MockDriver().install()
launch = DenseCase(3, 256, 512, torch.bfloat16, tile=Tile(64, 16, 64, 2, 4, 3, False)).launch(TARGETS["sm_90"])
with mock_device():
    attempt(launch.run)
    attempt(replace(launch, arguments={**launch.arguments, "x": torch.empty(3, 512, dtype=torch.bfloat16)}).run)
    attempt(replace(launch, arguments={**launch.arguments, "M": "3"}).run)
    attempt(replace(launch, grid=(1, 1 << 16)).run)
    attempt(lambda: torch.ones(3, device=CUDA) + torch.ones(3))
    attempt(lambda: torch.ones(3, device=CUDA).numpy())
"""


def test_the_rehearsal_refuses_what_a_gpu_would() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    fine, host, text, grid, mixed, converted = done.stdout.splitlines()
    assert fine == "nothing"
    assert host == "_linear_dense's x is in the host's memory"
    assert text == "failed to specialize argument of type: str"
    assert grid == "_linear_dense has a grid of 1, 65536, 1"
    assert mixed.startswith("Expected all tensors to be on the same device")
    assert converted.startswith("can't convert cuda:0 device type tensor to numpy")
