"""Compiling ahead, on a machine without a GPU: Triton is given a target that it does not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..tools.test_check import ENVIRONMENT

ABSENT = """
from dataclasses import replace
import torch
from smelt.runtime.kernels.linear.linear_dense import DenseCase
from smelt.runtime.kernels.base.precompile import compiling
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.tiles.tile import Tile
from triton.runtime.driver import driver

class Absent:
    def get_current_target(self):
        return TARGETS["sm_90"].of_triton()

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Absent())
case = DenseCase(3, 256, 512, torch.bfloat16, tile=Tile(64, 16, 64, 2, 4, 3, False))
launch = case.launch(TARGETS["sm_90"])
function = launch.function
with compiling(print) as take:
    take(launch)
    take(replace(case, rows=7, outputs=512).launch(TARGETS["sm_90"]))
    take(replace(case, tile=replace(case.tile, outputs=96)).launch(TARGETS["sm_90"]))

def never(*_, **__):
    raise AssertionError("it was compiled again")

function.compile = never
replace(case, rows=9, outputs=1024).launch(TARGETS["sm_90"]).warm()
print("found")
replace(case, tile=replace(case.tile, stages=4)).launch(TARGETS["sm_90"]).warm()
"""


@pytest.mark.slow
def test_like_launches_are_compiled_once_and_found_later() -> None:
    """The second needs no compilation of its own, the third has a width that is no power of two, the last is another."""
    done = subprocess.run([sys.executable, "-c", ABSENT], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    message, found = done.stdout.strip().splitlines()
    assert message.startswith("1 of 2 did not compile ahead; the first: ")
    assert "power of 2" in message
    assert found == "found", done.stderr
    assert "it was compiled again" in done.stderr
