"""Known faults of Triton's compiler that give wrong sums without an error, looked for in what it made of a kernel.

Both were found on an H100 with Triton 3.6; the interpreter cannot show them.
"""

from __future__ import annotations

import re

_LAYOUT = re.compile(r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = (\d)", re.MULTILINE)
_LEFT = re.compile(
    r"tt\.dot .*: tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = (#\w+), kWidth = (\d+)\}>> \*"
)
_IN_REGISTERS = re.compile(r"ttng\.warp_group_dot .*: tensor<[^>]*#ttg\.dot_op<")
_UNDER_WAY = re.compile(r"ttng\.warp_group_dot_wait .*pendings = [1-9]")


def compiler_faults(ttgir: str) -> list[str]:
    """What of them a kernel has, in words.

    Args:
        ttgir: Triton's code for GPUs, from which machine code is made.
    """
    faults = []
    if _IN_REGISTERS.search(ttgir) and _UNDER_WAY.search(ttgir):
        # https://github.com/triton-lang/triton/issues/9433
        faults.append("unpacks into registers that products of the iteration before may still read")
    second = {name for name, version in _LAYOUT.findall(ttgir) if version == "2"}
    for columns, layout, width in _LEFT.findall(ttgir):
        # https://github.com/triton-lang/triton/pull/11691
        if layout in second and int(columns) < 4 * int(width):
            faults.append(f"products over {columns} columns, of which threads hold {width} each: too many for so few")
            break
    return faults
