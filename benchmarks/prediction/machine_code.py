"""What a compiled launch's machine code says of its time: instructions before, in and after its loops, and how many fit a unit."""

from __future__ import annotations

import re
import subprocess
import tempfile
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from smelt.runtime.kernels.base.launch import Launch
from smelt.runtime.kernels.base.targets import Target
from smelt.runtime.kernels.tools.check import compiled

from .device import GpuFigures

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P[T\d]+\s)?\s*([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)
_TARGET = re.compile(r"(?:(!?U?P\d+), )?`?\(?0x([0-9a-f]+)")
_REGISTER = re.compile(r"\bR(\d+|Z)\b")
_MATRIX = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QGMMA")
_NEW = ("HGMMA", "IGMMA", "QGMMA")
_TOGETHER = ("SHFL", "BAR", "REDUX")  # what all threads of a program's real work come by
_WAIT = "ACQBULK"  # griddepcontrol.wait
_EARLY = ("LDGSTS", "LDG", "CCTL", "UBLKPF", "UTMAPF", "UTMALDG", "UBLKCP")


@dataclass(frozen=True)
class Instruction:
    """One of a thread's.

    Attributes:
        name: with its modifiers.
        maybe: whether a predicate may skip it.
        to: the number of the instruction that it jumps to; None if it does not.
        registers: that it names, where it is to first.
    """

    name: str
    maybe: bool
    to: int | None
    registers: tuple[str, ...] = ()

    def is_one_of(self, names: tuple[str, ...]) -> bool:
        """Whether it is, by the part before the modifiers."""
        return self.name.split(".")[0] in names


@dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
        first, last: its instructions' numbers.
        length: what an iteration runs when it skips what it can.
        matrix: of those on tensor cores.
        depth: how many of those need each other's sums.
    """

    first: int
    last: int
    length: int
    matrix: int
    depth: int


class Code:
    """A kernel's instructions, and the ways through them.

    Args:
        text: what cuobjdump makes of it.
    """

    def __init__(self, text: str) -> None:
        found = _LINE.findall(text)
        places = [int(at, 16) for at, *_ in found]
        kept: list[Instruction] = []
        for at, (_, predicate, name, rest) in zip(places, found, strict=True):
            where = _TARGET.search(rest) if name.startswith("BRA") else None
            if where is not None and int(where[2], 16) == at:
                break  # the end: what follows fills up memory
            to = None if where is None else bisect_left(places, int(where[2], 16))
            maybe = bool(predicate) or bool(where and where[1])
            kept.append(Instruction(name, maybe, to, tuple(_REGISTER.findall(rest))))
        self.instructions = kept

    def way(self, first: int, end: Callable[[int], bool], by: tuple[str, ...] = (), last: int | None = None) -> int:
        """How many instructions the shortest way runs.

        Args:
            first: where it begins.
            end: whether the instruction of a number is the last; it counts, too.
            by: of which it must come by at least one; any way will do for none.
            last: the last instruction that it may use; None for all.

        Returns:
            0 if there is no way.
        """
        code, most = self.instructions, len(self.instructions) - 1 if last is None else last
        start = (first, not by or code[first].is_one_of(by))
        steps, waiting = {start: 1}, deque([start])
        while waiting:
            at, seen = here = waiting.popleft()
            if seen and end(at):
                return steps[here]
            one = code[at]
            following = [] if one.name.startswith(("EXIT", "RET")) and not one.maybe else [at + 1]
            if one.to is not None:
                following = [one.to, *following] if one.maybe else [one.to]
            for to in following:
                if first <= to <= most and (there := (to, seen or code[to].is_one_of(by))) not in steps:
                    steps[there] = steps[here] + 1
                    waiting.append(there)
        return 0

    def is_end(self, at: int) -> bool:
        """Whether a thread ends there in any case."""
        return self.instructions[at].name.startswith("EXIT") and not self.instructions[at].maybe

    @cached_property
    def loops(self) -> list[Loop]:
        """All that have no other loop inside, in order."""
        ends: dict[int, int] = {}
        for at, one in enumerate(self.instructions):
            if one.to is not None and one.to <= at:
                ends[one.to] = at
        inner = [
            (first, last)
            for first, last in ends.items()
            if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in ends.items())
        ]
        found = []
        for first, last in sorted(inner):
            length = self.way(first, lambda at, last=last: at == last, last=last)
            products = [one for one in self.instructions[first : last + 1] if one.is_one_of(_MATRIX)]
            found.append(Loop(first, last, length, len(products), _depth(products)))
        return found


def _depth(products: list[Instruction]) -> int:
    """The longest chain in which each adds to what the one before gives."""
    depths: dict[str, int] = {}
    for one in products:
        depths[one.registers[0]] = depths.get(one.registers[-1], 0) + 1
    return max(depths.values(), default=0)


@dataclass(frozen=True)
class CodeCosts:
    """What a program's threads run.

    Attributes:
        registers, shared, warps: of a program; registers of a thread.
        residents: programs that fit a unit.
        before, after: instructions on the way to the main loop, and from it to the end; all of them before, if there is none.
        after_all: the same with whatever a way could skip.
        main, masked: the loop with products, and a second one for what does not fill a tile; None if there is none.
        scan, reduce: instructions of loops before and behind those.
        new_matrix: whether tensor cores are used by Hopper's own instructions.
        waits: instructions before the kernel waits for the one before it (programmatic dependent launch); -1 if it does not.
        reads_early: whether it reads, or prefetches, before that.
    """

    registers: int
    shared: int
    warps: int
    residents: int
    before: int
    after: int
    after_all: int
    main: Loop | None
    masked: Loop | None
    scan: int
    reduce: int
    new_matrix: bool
    waits: int
    reads_early: bool


def costs_of(launch: Launch, target: Target, device: GpuFigures) -> CodeCosts:
    """Compile a launch ahead of time, and read its code."""
    from triton import knobs

    found = compiled(launch, target)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(found.asm["cubin"])
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        text = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # pyright: ignore[reportOptionalSubscript]
    return costs_of_code(Code(text), registers, found.metadata.shared, launch.warps, device)


def costs_of_code(code: Code, registers: int, shared: int, warps: int, device: GpuFigures) -> CodeCosts:
    """The same of code that was read already."""
    products = [loop for loop in code.loops if loop.matrix]
    others = [loop for loop in code.loops if not loop.matrix]
    main = products[0] if products else None
    waits = next((i for i, one in enumerate(code.instructions) if one.is_one_of((_WAIT,))), None)
    early = code.instructions[: waits or 0]
    if main is None:
        by = _TOGETHER if any(one.is_one_of(_TOGETHER) for one in code.instructions) else ()
        before, after, after_all, scan, reduce = code.way(0, code.is_end, by), 0, 0, 0, 0
    else:
        end = products[-1].last
        before = code.way(0, lambda at: at == main.first) - 1
        after = code.way(end, code.is_end) - 1
        behind = [loop for loop in others if loop.first > end]
        after_all = len(code.instructions) - end - 1 - sum(loop.last - loop.first + 1 for loop in behind)
        scan = max((loop.length for loop in others if loop.last < main.first), default=0)
        reduce = max((loop.length for loop in behind), default=0)
    return CodeCosts(
        registers=registers,
        shared=shared,
        warps=warps,
        residents=_residents(registers, shared, warps, device),
        before=before,
        after=after,
        after_all=after_all,
        main=main,
        masked=products[1] if len(products) > 1 else None,
        scan=scan,
        reduce=reduce,
        new_matrix=any(one.is_one_of(_NEW) for one in code.instructions),
        waits=-1 if waits is None else code.way(0, lambda at: at == waits),
        reads_early=any(one.is_one_of(_EARLY) for one in early),
    )


def _residents(registers: int, shared: int, warps: int, device: GpuFigures) -> int:
    of_registers = device.registers // (-(-registers * 32 // 256) * 256 * warps)
    of_shared = device.shared // (shared + 1024)
    return max(1, min(of_registers, of_shared, device.warps // warps, device.programs))
