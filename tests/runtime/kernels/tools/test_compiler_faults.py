"""Code in which Triton's known faults are, and code in which they are not; the lines are Triton's, shortened."""

from __future__ import annotations

import pytest
from smelt.runtime.kernels.tools.compiler_faults import compiler_faults

HOPPER = (
    "#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 256, 16]}>\n"
)
AMPERE = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 8]}>\n"
IN_REGISTERS = "%1 = ttng.warp_group_dot %a, %b, %c {isAsync = true} : tensor<128x16xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>> * !ttg.memdesc<16x256xbf16, #shared3> -> tensor<128x256xf32, #mma>\n"
IN_MEMORY = "%1 = ttng.warp_group_dot %a, %b, %c {isAsync = true} : !ttg.memdesc<128x64xbf16, #shared> * !ttg.memdesc<64x256xbf16, #shared3> -> tensor<128x256xf32, #mma>\n"
WAIT = "%2:2 = ttng.warp_group_dot_wait %1, %b {{pendings = {} : i32}} : tensor<128x256xf32, #mma>\n"


@pytest.mark.parametrize(
    ("dot", "pending", "faulty"), [(IN_REGISTERS, 3, True), (IN_REGISTERS, 0, False), (IN_MEMORY, 1, False)]
)
def test_registers_that_are_still_read(dot: str, pending: int, faulty: bool) -> None:
    assert bool(compiler_faults(HOPPER + dot + WAIT.format(pending))) == faulty


@pytest.mark.parametrize(
    ("columns", "width", "faulty"), [(16, 8, True), (32, 8, False), (16, 4, False), (16, 2, False), (8, 4, True)]
)
def test_products_narrower_than_threads_hold(columns: int, width: int, faulty: bool) -> None:
    left = f"tensor<64x{columns}xf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {width}}}>>"
    right = f"tensor<{columns}x8xf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = {width}}}>>"
    dot = f"%acc = tt.dot %a, %b, %c : {left} * {right} -> tensor<64x8xf32, #mma>\n"
    assert bool(compiler_faults(AMPERE + dot)) == faulty
    assert not compiler_faults(HOPPER + dot)
