"""What this machine and this process may use, and how much a run will."""

from __future__ import annotations

import ctypes
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
# Pieces up to this size are kept when freed; glibc arrives at 32 MB by itself.
_LEAST_KEPT = 1 << 20


@dataclass(frozen=True)
class Cost:
    """What a step takes.

    Attributes:
        memory: bytes at the peak, above what the process held before.
        disk: bytes written, intermediate files included.
        operations: multiply-adds times two.
        sequential: columns that are rounded one after another.
        collected: bytes that the first of several processes writes beside, of what the others have.
        sharded: of the memory, what each of several processes has its share of only, where weights are sharded.
    """

    memory: int
    disk: int
    operations: float
    sequential: int = 0
    collected: int = 0
    sharded: int = 0

    def of_each(self, shards: int) -> int:
        """The memory of each of several processes, over which weights are sharded."""
        return self.memory - self.sharded + self.sharded // shards

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            max(self.memory, other.memory),
            self.disk + other.disk,
            self.operations + other.operations,
            self.sequential + other.sequential,
            self.collected + other.collected,
            max(self.sharded, other.sharded),
        )


def free_disk(path: Path) -> int:
    """Bytes free where ``path`` is or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def matmul_rate() -> float:
    """Operations a second of a float32 matrix product here, measured in about a tenth of a second."""
    a = torch.randn(768, 768)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        best = max(best, 2 * 768**3 / (time.perf_counter() - start))
    return best


def return_memory_at_once() -> None:
    """Make freed tensors leave the process, instead of being kept for the next ones.

    The C library keeps what it expects to need again, which costs up to half as much memory again as is
    in use. Returning it costs time (a quarter more was measured), so this is for runs that are short of memory.
    """
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LEAST_KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LEAST_KEPT)


def release_freed_memory() -> None:
    """Hand back to the system what this process has freed; the C library keeps it otherwise. Takes milliseconds."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def compute_dtype(stored: torch.dtype, device: str = "cpu") -> torch.dtype:
    """What to compute in while calibrating a model stored as ``stored``, on this CPU or on a GPU.

    bfloat16 where the model is bfloat16 and the device multiplies it natively, which is two to five times
    faster here; float32 otherwise.
    """
    if device != "cpu":
        return torch.bfloat16 if stored == torch.bfloat16 else torch.float32
    native = torch.cpu.get_capabilities().get("avx512_bf16", False) or torch.cpu.get_capabilities().get(
        "amx_bf16", False
    )
    return torch.bfloat16 if stored == torch.bfloat16 and native else torch.float32


def human_time(seconds: float) -> str:
    """``200`` as ``3 min 20 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
