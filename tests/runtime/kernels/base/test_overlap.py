"""Launches that begin before the one before them has ended: who has the attribute, and that compiled kernels are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from smelt.runtime.kernels.tools.check import exchanging, unordered

from ..tools.test_check import ENVIRONMENT

ROOT = Path(__file__).parents[4]

LAUNCHED = """
import sys
from functools import partial
import torch
from smelt.system.hardware.device import on
from smelt.runtime.kernels.linear.linear_dense import DenseCase
from smelt.runtime.kernels.base.launch import overlapping
from smelt.runtime.kernels.base.precompile import precompile
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.tiles.tile import Tile
from tests.runtime.kernels.mock_device import CUDA, mock_device
from tests.runtime.kernels.mock_driver import MockDriver

what, arch, allowed = sys.argv[1:]
driver = MockDriver(arch=int(arch)).install()
target = TARGETS["sm_" + arch]
launch = DenseCase(3, 256, 512, torch.bfloat16, tile=Tile(64, 16, 64, 2, 4, 3, False)).launch(target)
with mock_device(), on(CUDA, partial(overlapping, allowed == "overlapping")):
    if what == "ahead":
        precompile([launch], print)
    else:
        launch.run()
        print(driver.overlapped)
"""


def _launched(folder: Path, what: str, arch: str = "90", allowed: str = "overlapping") -> str:
    environment = {**ENVIRONMENT, "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", LAUNCHED, what, arch, allowed]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _waits(folder: Path) -> list[bool]:
    return ["griddepcontrol.wait" in path.read_text() for path in folder.glob("*/*.ptx")]


@pytest.mark.slow
def test_what_was_compiled_ahead_is_found_by_launches_of_another_process(tmp_path: Path) -> None:
    _launched(tmp_path, "ahead")
    assert _waits(tmp_path) == [True]
    assert _launched(tmp_path, "launch") == "[True]"
    assert _waits(tmp_path) == [True]  # nothing was compiled again


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "allowed"), [("80", "overlapping"), ("90", "not overlapping")])
def test_neither_older_gpus_nor_who_does_not_want_it_get_the_attribute(arch: str, allowed: str, tmp_path: Path) -> None:
    assert _launched(tmp_path, "launch", arch, allowed) == "[False]"
    assert _waits(tmp_path) == [False]


def _code(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/                   {one} ;" for i, one in enumerate(instructions))


@pytest.mark.parametrize(
    ("instructions", "fault"),
    [
        (["LDC R1, c[0x0][0x28]", "PREEXIT", "CCTL.E.PF2 [R2]", "ACQBULK", "LDG.E R4, [R2.64]", "EXIT"], None),
        (["LDG.E.EF.128 R4, [R2.64]", "ACQBULK", "PREEXIT", "EXIT"], None),  # weights
        (["PREEXIT", "LDG.E R4, [R2.64]", "ACQBULK", "EXIT"], "(LDG) before it has waited"),
        (["PREEXIT", "@!P0 STG.E.64 [R2.64], R4", "ACQBULK", "EXIT"], "(STG) before it has waited"),
        (["PREEXIT", "@P0 EXIT", "ACQBULK", "EXIT"], "may end (EXIT) without waiting"),
        (["PREEXIT", "@P0 BRA 0x30", "ACQBULK", "EXIT"], "may end (BRA) without waiting"),
        (["@P0 BRA 0x20", "NANOSLEEP 0x64", "PREEXIT", "ACQBULK", "EXIT"], None),
        (["PREEXIT", "LDG.E R4, [R2.64]", "EXIT"], "does not wait"),
        (["PREEXIT", "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR6, UR6", "ACQBULK", "EXIT"], "tensor memory"),
        (["UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR6, UR6", "PREEXIT", "ACQBULK", "EXIT"], None),
    ],
)
def test_a_kernel_that_does_not_wait_shows_in_its_machine_code(instructions: list[str], fault: str | None) -> None:
    found = unordered(_code(*instructions))
    assert found == [] if fault is None else len(found) == 1 and fault in found[0]


@pytest.mark.parametrize(
    ("instructions", "fault"),
    [
        (
            [
                "LDG.E R4, [R2.64]",
                "HMMA.16816.F32 R8, R4, R6, R8",
                "LDG.E R6, [R2.64]",
                "HMMA.16816.F32 R8, R4, R6, R8",
            ],
            None,
        ),
        (["STS [R1], R4", "BAR.SYNC.DEFER_BLOCKING 0x0", "HMMA.16816.F32 R8, R4, R6, R8", "STS [R1], R8"], None),
        (
            [
                "HMMA.16816.F32 R8, R4, R6, R8",
                "STS [R1], R4",
                "BAR.SYNC.DEFER_BLOCKING 0x0",
                "HMMA.16816.F32 R8, R4, R6, R8",
            ],
            "(BAR, STS)",
        ),
    ],
    ids=["from memory", "before and behind", "between"],
)
def test_what_goes_through_shared_memory_between_products_shows(instructions: list[str], fault: str | None) -> None:
    found = exchanging(_code(*instructions))
    assert found == [] if fault is None else len(found) == 1 and fault in found[0]
