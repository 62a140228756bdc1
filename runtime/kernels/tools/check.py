"""Compiling every shipped kernel for other machines, and checking the machine code.

The machine code shows what would make a kernel slow: register spills, products without tensor cores,
narrow loads, too much shared memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..base.kernel import Build
from ..base.launch import Launch, overlaps_on
from ..base.targets import TARGETS, Target
from .compiler_faults import compiler_faults
from .registry import KERNELS

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_JUMP = re.compile(
    r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\d+ )?BRA(?:\.\w+)* (?:!?U?P\d+, )?`?\(?(?:0x)?([0-9a-f]+)\b", re.MULTILINE
)
_LOADS = re.compile(r"(?:tt\.load|async_copy_global_to_local|buffer_load\w*)\b[^\n]*")
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\]", re.MULTILINE)
# Instructions that access memory that other launches see, and that end a program. Subroutines are ptxas's, and return.
_TOUCHES = frozenset(["LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UTMALDG"])
# Loads that evict first: of weights, which nothing writes during a step.
_OF_WEIGHTS = "LDG.E.EF"
_LEAVES = frozenset(["BRX", "JMP", "EXIT"])
_EXCHANGES = frozenset(["BAR", "LDS", "LDSM", "SHFL", "STS"])
_FEW_BYTES = 16  # that hold no values: the state of barriers
_BYTES = {"i8": 1, "f8E4M3FN": 1, "f8E4M3FNUZ": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4}


@dataclass(frozen=True)
class Compiled:
    """The result of one build.

    Attributes:
        kernel, build, target: which.
        registers: of a thread.
        spills: registers kept in memory instead.
        shared: bytes of shared memory.
        occupancy: the share of a unit's warps that can be resident at once.
        wide_loads: instructions that load 16 bytes per thread.
        matrix: instructions for tensor cores.
        kinds: which ones.
        loop: instructions per iteration and thread of the longest loop; 0 on AMD, where they are not counted.
        faults: the checks that it fails, in words.
    """

    kernel: str
    build: str
    target: str
    registers: int
    spills: int
    shared: int
    occupancy: float
    wide_loads: int
    matrix: int
    kinds: tuple[str, ...]
    loop: int
    faults: tuple[str, ...]


def check(targets: Sequence[str], kernels: Sequence[str] = (), *, rare: bool = True) -> Iterator[Compiled]:
    """Compile all builds for some targets, on all processors; results are yielded in order.

    Args:
        targets: names of :data:`TARGETS`.
        kernels: names of kernels; empty for all.
        rare: also builds whose format, tile and options others cover.

    Raises:
        KeyError: a name is unknown.
    """
    todo = [
        (kernel.name, build.name, target)
        for target in targets
        for kernel in KERNELS
        if not kernels or kernel.name in kernels
        for build in kernel.builds
        if (rare or not build.rare) and (not build.targets or target in build.targets)
    ]
    # Triton in interpreter mode compiles nothing, and the mode is fixed per process.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            yield from pool.map(_compile_named, todo, chunksize=4)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def compile_build(kernel: str, build: Build, target: Target) -> Compiled:
    """Compile one build, and read its code."""
    launch = build.launch(target)
    try:
        found = compiled(launch, target)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = (str(cause).strip() or type(cause).__name__).splitlines()[-1][:200]
        return Compiled(kernel, build.name, target.name, 0, 0, 0, 0.0, 0, 0, (), 0, (f"does not compile: {first}",))
    code = "" if target.backend == "hip" else _machine_code(found)
    registers, spills, counts, loop = _amd(found) if target.backend == "hip" else _nvidia(code)
    shared = found.metadata.shared
    claimed = target.matrix if build.wide else target.matrix + target.narrow
    matrix = sum(n for name, n in counts.items() if name.startswith(claimed))
    kinds = tuple(sorted({name.split(".")[0] for name in counts if name.startswith(claimed)}))
    wide = sum(n for name, n in counts.items() if _is_wide(name))
    faults = []
    if spills:
        faults.append(f"{spills} registers spilled")
    if shared > target.shared:
        faults.append(f"{shared} bytes of shared memory, the limit is {target.shared}")
    if build.matrix and not matrix:
        faults.append(f"no {' or '.join(claimed)}, so no tensor cores")
    if build.streamed and not wide:
        faults.append("no 16-byte loads")
    faults += _narrow(found.asm["ttgir"], launch, build.streamed)
    if target.backend == "cuda":
        faults += compiler_faults(found.asm["ttgir"])
    if build.overlapped and target.backend == "cuda":
        faults += _waiting(found.asm["ttgir"])
    if target.backend == "cuda" and kernel == "linear_codes" and launch.constants["SLICES"] > 1:
        faults += exchanging(code)
    if overlaps_on(target.backend, target.arch):
        faults += unordered(code)
    bytewise = sum(n for name, n in counts.items() if name in ("LDS.U8", "LDS.S8"))
    if build.overlapped and bytewise > _FEW_BYTES:
        faults.append(f"{bytewise} reads of single bytes from shared memory")
    occupancy = _occupancy(registers, shared, launch.warps, target)
    return Compiled(
        kernel, build.name, target.name, registers, spills, shared, occupancy, wide, matrix, kinds, loop, tuple(faults)
    )


def compiled(launch: Launch, target: Target) -> Any:
    """Triton's own result for a target."""
    import triton

    options = launch.options(overlaps_on(target.backend, target.arch))
    return triton.compile(launch.source(target), target=target.of_triton(), options=options)


def _compile_named(which: tuple[str, str, str]) -> Compiled:
    name, build_name, target = which
    kernel = next(k for k in KERNELS if k.name == name)
    return compile_build(name, next(b for b in kernel.builds if b.name == build_name), TARGETS[target])


def unordered(code: str) -> list[str]:
    """Violations of the rule to wait for earlier launches first (see launch.py); weights may be read or prefetched before."""
    places = [(int(at, 16), name) for at, name in _INSTRUCTION.findall(code)]
    waits = [at for at, name in places if name == "ACQBULK"]
    begins = [at for at, name in places if name == "PREEXIT"]
    if not waits or not begins:
        return ["does not wait for earlier launches, or lets no later one begin early"]
    if any(at > begins[0] for at, name in places if name.startswith("UTCATOMSWS.FIND")):
        return ["lets later launches begin before it has its tensor memory; they may take it and then wait for its end"]
    before = {name.split(".")[0] for at, name in places if at < waits[0] and not name.startswith(_OF_WEIGHTS)}
    # Branches to before the wait still reach it: Blackwell's tensor memory is allocated in loops.
    past = any(int(at, 16) < waits[0] < int(to, 16) for at, to in _JUMP.findall(code))
    faults = []
    if touching := sorted(_TOUCHES & before):
        faults.append(f"reads or writes ({', '.join(touching)}) before it has waited for earlier launches")
    if leaving := sorted(_LEAVES & before) + ["BRA"] * past:
        faults.append(f"may end ({', '.join(leaving)}) without waiting for earlier launches")
    return faults


def exchanging(code: str) -> list[str]:
    """Whether threads exchange anything between a kernel's products: slices' must not (see slices.py), but Triton may choose so."""
    names = [name for _, name in _INSTRUCTION.findall(code)]
    products = [i for i, name in enumerate(names) if name.startswith("HMMA")]
    if not products:
        return []
    between = {name.split(".")[0] for name in names[products[0] : products[-1]]} & _EXCHANGES
    return [f"exchanges weights or inputs between threads ({', '.join(sorted(between))})"] if between else []


def _machine_code(found: Any) -> str:
    """cuobjdump's output for a kernel: its resources, then its instructions."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(found.asm["cubin"])
        tool = knobs.nvidia.cuobjdump.path
        dumps = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
        return "\n".join(dumps)


def _nvidia(code: str) -> tuple[int, int, Counter[str], int]:
    """Registers, spills, instructions and those of the longest loop, from the machine code."""
    counts = Counter(name for _, name in _INSTRUCTION.findall(code))
    registers = int(re.search(r"REG:(\d+)", code)[1])  # pyright: ignore[reportOptionalSubscript]
    spills = sum(n for name, n in counts.items() if name.split(".")[0] in ("LDL", "STL"))
    # A backward branch closes a loop; an instruction takes 16 bytes.
    jumps = ((int(at, 16), int(to, 16)) for at, to in _JUMP.findall(code))
    return registers, spills, counts, max(((at - to) // 16 + 1 for at, to in jumps if to < at), default=0)


def _amd(found: Any) -> tuple[int, int, Counter[str], int]:
    text = found.asm["amdgcn"]
    facts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text))
    # Scalars that find no register go to lanes of vector registers; what goes to memory needs a segment there.
    spills = max(int(facts["vgpr_spill_count"]), int(facts["private_segment_fixed_size"]) // 4)
    counts = Counter(re.findall(r"^\s+([a-z][a-z_0-9]+)\s", text, re.MULTILINE))
    return int(facts["vgpr_count"]), spills, counts, 0


def _is_wide(instruction: str) -> bool:
    """Whether it loads 16 bytes from memory for each thread."""
    if instruction.startswith(("LDG", "LDGSTS")):
        return ".128" in instruction or "ENL2.256" in instruction
    return instruction in ("global_load_dwordx4", "buffer_load_dwordx4", "global_load_lds_dwordx4")


def _narrow(ttgir: str, launch: Launch, streamed: tuple[str, ...]) -> list[str]:
    """The arguments that must be read with 16-byte loads per thread but are not, by the compiler's layouts."""
    per_thread = {name: _product(sizes) for name, sizes in _LAYOUT.findall(ttgir)}
    wanted = {_element(launch.arguments[name]): name for name in streamed}
    seen: dict[str, int] = {}
    for line in _LOADS.findall(ttgir):
        for element, layout in re.findall(r"x!tt\.ptr<(\w+)>, (#\w+)>", line):
            if element in wanted and layout in per_thread:
                seen[element] = max(seen.get(element, 0), per_thread[layout] * _BYTES[element])
        for element, layout in re.findall(r"(?:->|:) tensor<[\dx]+x(\w+), (#\w+)>", line):
            if element in wanted and layout in per_thread:
                seen[element] = max(seen.get(element, 0), per_thread[layout] * _BYTES[element])
    return [
        f"{name} is read {seen.get(element, 0)} bytes a thread, not 16"
        for element, name in wanted.items()
        if seen.get(element, 0) < 16
    ]


def _waiting(ttgir: str) -> list[str]:
    """Loops that wait for all their copies before they compute, so that no load is in flight meanwhile."""
    loops: list[tuple[int, list[str]]] = []
    faults = []
    for line in ttgir.splitlines():
        depth = len(line) - len(line.lstrip())
        while loops and depth <= loops[-1][0] and line.strip():
            _, body = loops.pop()
            waits = [int(n) for each in body for n in re.findall(r"ttg.async_wait.*num = (\d+)", each)]
            if waits and waits[0] == 0 and any("async_copy_global_to_local" in each for each in body):
                faults.append("a loop waits for all that it reads")
        if " scf.for " in line:
            loops.append((depth, []))
        elif loops:
            loops[-1][1].append(line)
    return faults[:1]


def _element(tensor: Any) -> str:
    import torch

    names = {
        torch.int8: "i8",
        torch.uint8: "i8",
        torch.int16: "i16",
        torch.float8_e4m3fn: "f8E4M3FN",
        torch.float8_e4m3fnuz: "f8E4M3FNUZ",
        torch.bfloat16: "bf16",
        torch.float16: "f16",
        torch.float32: "f32",
    }
    return names[tensor.dtype]


def _product(sizes: str) -> int:
    found = 1
    for size in sizes.split(","):
        found *= int(size)
    return found


def _occupancy(registers: int, shared: int, warps: int, target: Target) -> float:
    """The share of a unit's warps that fit at once."""
    if target.backend == "hip":
        # Each of four vector units has 512 registers for each of 64 lanes, given out by eights, and 8 waves.
        of_registers = 4 * min(8, 512 // max(8, -(-registers // 8) * 8)) // warps
    else:
        of_registers = target.registers // (-(-registers * target.lanes // 256) * 256 * warps)
    reserved = 0 if target.backend == "hip" else 1024
    of_shared = target.shared_of_unit // (shared + reserved) if shared else target.warps
    return min(of_registers, of_shared, target.warps // warps) * warps / target.warps
