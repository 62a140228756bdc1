"""What the compiler made of the kernels' innermost loops: instructions are counted, since no timing can be relied on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from smelt.runtime.native import library

ROWS = 6  # of a full panel in linear_codes.cpp
_COPY = re.compile(r"vmov(?:dqa|aps|dqu|ups)\w*\s+%zmm\d+,%zmm\d+$")
_SPILL = re.compile(r"vmov(?:dqa|aps|dqu|ups)\w*\s+%zmm\d+,-?(?:0x)?[0-9a-f]*\(%r[sb]p\)$")


@pytest.fixture(scope="module")
def code() -> dict[str, list[tuple[int, str]]]:
    """Of each function in the compiled module: its instructions and where they stand."""
    notices: list[str] = []
    if library.kernels(notices.append) is None:
        pytest.skip(notices[-1])
    if "avx512_vnni" not in library.processor_features():
        pytest.skip("this processor has no AVX-512 VNNI, whose instructions are counted")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here")
    built = library._kept()
    return _disassembled(built)


def _disassembled(path: Path) -> dict[str, list[tuple[int, str]]]:
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    body: list[tuple[int, str]] = []
    for line in text.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            body = found.setdefault(header[1], [])
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+(.+?)\s*$", line):
            body.append((int(instruction[1], 16), instruction[2]))
    return found


def _innermost(body: list[tuple[int, str]], operation: str) -> list[str]:
    """The shortest loop with the operation in it."""
    loops = []
    for at, instruction in body:
        jump = re.match(r"j\w+\s+([0-9a-f]+)\b", instruction)
        if jump and int(jump[1], 16) <= at:
            inside = [text for where, text in body if int(jump[1], 16) <= where <= at]
            if any(text.startswith(operation) for text in inside):
                loops.append(inside)
    assert loops, f"no loop has {operation}"
    return min(loops, key=len)


@pytest.mark.parametrize(("form", "products"), [(1, 2), (2, 4)], ids=["8 bits", "two planes"])
def test_sums_stay_in_their_registers(code: dict[str, list[tuple[int, str]]], form: int, products: int) -> None:
    (name,) = (
        name
        for name in code
        if re.search(rf"rows_by_tilesIL\w+FormE{form}ELi{ROWS}ELi1ELi1Et", name) and "cold" not in name
    )
    loop = _innermost(code[name], "vpdpbusd")
    assert sum(text.startswith("vpdpbusd") for text in loop) == products * ROWS
    # GCC 12 by itself leaves 24 copies for 12 products.
    assert sum(bool(_COPY.match(text) or _SPILL.match(text)) for text in loop) < ROWS
