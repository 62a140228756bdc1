"""A kernel's launch as a value: it can be run, or compiled for another machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .targets import Target

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
}

# Arguments on whose values Triton does not specialize: a step's number of rows changes constantly, and must not cause
# recompilation; the most tokens of a sequence differ from engine to engine.
GENERAL = ("M", "row_tiles", "split", "sequences", "programs", "tables_stride", "scratch_stride", "items", "most")


@dataclass(frozen=True)
class Launch:
    """Everything that one launch needs.

    Attributes:
        function: the Triton function.
        arguments: by name; tensors, integers, or None if absent.
        constants: compile-time arguments.
        grid: programs.
        warps: of a program.
        stages: how many iterations' loads are in flight.
    """

    function: Any
    arguments: dict[str, Tensor | int | None]
    constants: dict[str, Any]
    grid: tuple[int, ...]
    warps: int
    stages: int

    def run(self) -> None:
        """Launch it on its tensors' device; or only report it, while launches are :func:`noted`."""
        observer = _OBSERVER.get()
        if observer is not None:
            observer(self)
            return
        overlapped = overlaps()
        self.function[self.grid](**self.arguments, **self._constants(overlapped), **self.options(overlapped))

    def warm(self) -> None:
        """Compile it for the current device, without tensors; others' launches then find it in Triton's cache."""
        from triton.runtime.jit import MockTensor

        shapes = {
            name: MockTensor(value.dtype) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        overlapped = overlaps()
        self.function.warmup(**shapes, **self._constants(overlapped), grid=self.grid, **self.options(overlapped))

    def options(self, overlapped: bool) -> dict[str, Any]:
        """Triton's options beside the arguments; part of the key of compiled kernels."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        return {**options, "launch_pdl": True} if overlapped else options

    def _constants(self, overlapped: bool) -> dict[str, Any]:
        return {**self.constants, "PDL": overlapped}

    def source(self, target: Target) -> Any:
        """What Triton compiles ahead of time, specialized as a launch would be: integers that are one, or multiples of 16."""
        from triton.compiler import ASTSource

        signature: dict[str, str] = {}
        constants = self._constants(overlaps_on(target.backend, target.arch))
        if "ASM" in constants:
            constants["ASM"] = target.backend == "cuda"
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for place, parameter in enumerate(self.function.params):
            name = parameter.name
            general = name in GENERAL
            value = self.arguments.get(name)
            if name in constants or value is None or (isinstance(value, int) and value == 1 and not general):
                signature[name] = "constexpr"
                constants.setdefault(name, value)
                continue
            signature[name] = f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else _integer_type(value)
            if isinstance(value, Tensor) or (value % 16 == 0 and not general):
                attributes[(place,)] = [["tt.divisibility", 16]]
        return ASTSource(self.function, signature=signature, constexprs=constants, attrs=attributes)


# Thread-local: other threads' launches still run.
_OBSERVER: ContextVar[Callable[[Launch], object] | None] = ContextVar("observer", default=None)


@contextmanager
def noted(observer: Callable[[Launch], object]) -> Iterator[None]:
    """Launch nothing inside; outputs stay uninitialized.

    Args:
        observer: called with each launch instead; keeping the launch keeps its tensors.
    """
    before = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(before)


# Programmatic dependent launch
# -----------------------------
# At the end of a launch units are idle, and at the start of the next one programs compute their index, read their
# arguments and wait for memory: a few microseconds, 200 times a token. From sm_90 on all launches here have the
# attribute that lets them begin as soon as every program of the previous launch has ended or allowed it. In return each
# kernel must follow a rule (check.py verifies it in the machine code):
#
#   Every program, on every path, waits (`wait_for_earlier` of overlap.py) before it reads what an earlier launch of the
#   step wrote, and before it writes what an earlier launch may still read (outputs, workspaces, the cache). Also a program
#   that has nothing to do and returns.
#
# The wait ends when the previous launch has completed. That its predecessors have completed, too, follows only because
# none of its programs completes before it has waited itself: with a single path without the wait, launch C could begin
# work when B has ended while A still writes. Data that nothing writes during a step (weights) may be prefetched and read
# before; loads of weights evict first, and no others do, so that machine code shows which they are. And resources that
# programs of other launches could use up must be allocated before these may begin: Triton allocates Blackwell's tensor
# memory first of all.
#
# Where weights are copied to the device for each layer, the wait for the copy is an edge of its own: the next launch begins
# after it and after everything before.
#
# torch's operators in between lack the attribute: they wait for everything before them, and later launches wait for
# their end. A captured graph keeps these edges (CUDA 12.3 and later). A kernel compiled with the wait also works when
# launched without the attribute.
_OVERLAPPED: ContextVar[bool] = ContextVar("overlapped", default=True)
# Rows from which launches do not overlap: an 8B in W4A16 took 7% longer with overlap at 64 on an H100 (8% less at one; nothing
# between was measured).
_APART = 64


@contextmanager
def overlapping(allowed: bool) -> Iterator[None]:
    """Enable or disable the overlap of launches inside: to measure its benefit, or where it has none."""
    before = _OVERLAPPED.set(allowed)
    try:
        yield
    finally:
        _OVERLAPPED.reset(before)


@contextmanager
def overlapping_at(rows: int) -> Iterator[None]:
    """Let launches overlap inside as in a step of so many rows."""
    with overlapping(may_overlap() and rows < _APART):
        yield


def may_overlap() -> bool:
    """Whether overlap is enabled here (see :func:`overlapping`), whatever the device."""
    return _OVERLAPPED.get()


def overlaps() -> bool:
    """Whether launches on the current device overlap with their predecessors."""
    if interpreted() or not may_overlap():
        return False
    from triton.runtime.driver import driver

    active: Any = driver.active
    return _overlaps_on_device(active.get_current_device())


@cache
def _overlaps_on_device(_: int) -> bool:
    from triton.runtime.driver import driver

    target: Any = driver.active.get_current_target()
    return overlaps_on(target.backend, target.arch)


def overlaps_on(backend: str, arch: int | str) -> bool:
    """Whether launches on such a device can overlap."""
    return backend == "cuda" and int(arch) >= 90


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def takes_ptx(device: torch.device) -> bool:
    """Whether a kernel's PTX can run there; ``meta`` counts as a machine with PTX, for compilation."""
    return not interpreted() and torch.version.hip is None and device.type in ("cuda", "meta")


def multiplied_as(dtype: torch.dtype) -> tl.dtype:
    """The dtype of a kernel's products: float32 in Triton's interpreter, which multiplies bfloat16 bits as integers."""
    if dtype == torch.bfloat16:
        return tl.float32 if interpreted() else tl.bfloat16
    return tl.float16


def _integer_type(value: int) -> str:
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
