"""What the compiler makes of the shipped kernels, for four kinds of GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from smelt.compress.cli import app
from typer.testing import CliRunner

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""


# A folder with another version of Triton than the installed one, docs/kernels.md says how to get it.
OTHER_TRITON = os.environ.get("SMELT_OTHER_TRITON", "")


def smelt(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smelt.compress.cli", "kernels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | more, check=False)


def here(*arguments: str) -> Result:
    """The same in this process, where Triton is in its interpreter: for what ends before anything is compiled."""
    return CliRunner().invoke(app, ["kernels", *arguments])


TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        pytest.param(["--quick", "--target", "sm_90"], ["sm_90"], marks=pytest.mark.slow),
        pytest.param(["--quick"], TARGETS, marks=pytest.mark.slow),
        pytest.param([], TARGETS, marks=pytest.mark.slow),
    ],
    ids=["quick for one", "quick", "all"],
)
def test_all_shipped_kernels_compile_clean(options: list[str], targets: list[str]) -> None:
    done = smelt("check", "--json", *options)
    assert done.returncode == 0, done.stderr
    compiled: list[dict[str, Any]] = json.loads(done.stdout)
    assert {one["target"] for one in compiled} == set(targets)
    for one in compiled:
        assert one["faults"] == [], one
        assert one["registers"] > 16, one
        assert one["spills"] == 0, one
        assert 0 < one["occupancy"] <= 1, one
        if one["kernel"].startswith("linear"):
            assert one["wide_loads"] > 0, one
            assert one["matrix"] > 0, one


@pytest.mark.slow
@pytest.mark.skipif(not OTHER_TRITON, reason="SMELT_OTHER_TRITON names no folder")
def test_all_shipped_kernels_compile_clean_with_another_triton(tmp_path: Path) -> None:
    path = os.pathsep.join([OTHER_TRITON, ENVIRONMENT.get("PYTHONPATH", "")]).strip(os.pathsep)
    there = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", "import triton; print(triton.__file__)"]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | there, check=True).stdout
    assert Path(found.strip()).is_relative_to(Path(OTHER_TRITON).resolve())
    done = smelt("check", "--json", **there)
    faults = [one for one in json.loads(done.stdout) if one["faults"]]
    assert faults == [], done.stderr


BAD = """
from dataclasses import replace
import torch
from smelt.runtime.kernels.tools.check import compile_build
from smelt.runtime.kernels.linear.linear_codes import CodesCase
from smelt.runtime.kernels.rows.quantize_rows import KERNEL
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.tiles.tile import Tile

def show(case, target, **changes):
    print("; ".join(compile_build("", replace(case.build(), **changes), TARGETS[target]).faults))

case = CodesCase("int4", 64, 4096, 4096, 128, torch.bfloat16)
if __name__ == "__main__":
    show(replace(case, tile=Tile(128, 128, 256, 2, 8, 5, True)), "sm_90")
    show(replace(case, tile=Tile(64, 128, 64, 2, 1, 3, True)), "sm_90")
    show(replace(case, tile=Tile(64, 16, 64, 2, 8, 3, False)), "sm_90")
    show(replace(case, outputs=6144, tile=Tile(96, 16, 64, 2, 4, 3, False)), "sm_90")
    print("; ".join(compile_build("", replace(KERNEL.builds[0], matrix=True), TARGETS["sm_80"]).faults))
"""


@pytest.mark.slow
def test_each_gate_falls() -> None:
    done = subprocess.run([sys.executable, "-c", BAD], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    shared, spilled, narrow, broken, plain = done.stdout.splitlines()
    assert "shared memory, the limit is 232448" in shared
    assert "registers spilled" in spilled
    assert "codes is read 8 bytes a thread, not 16" in narrow
    assert "does not compile" in broken
    assert "no HMMA or IMMA, so no tensor cores" in plain


@pytest.mark.parametrize(("option", "name"), [("--target", "sm_70"), ("--kernel", "attention")])
def test_unknown_names_are_show(option: str, name: str) -> None:
    done = here("check", option, name)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"smelt: unknown {option[2:]} '{name}'; known: ")
    assert done.stderr.count("\n") == 1


def test_tuning_without_a_gpu_says_so() -> None:
    done = here("tune", "--form", "int4")
    assert done.exit_code == 1
    assert (
        done.stderr
        == "smelt: tiles are tuned on a GPU, and this machine has none; without tuning, the shipped tiles are used\n"
    )
