"""Weights in a file that is mapped to memory, so that only those in use need be there."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from ...system.hardware.machine import human_bytes

_PAGE = mmap.PAGESIZE
# Smaller ones stay in memory.
_LEAST = 1 << 16
# From the kernel's headers; Python does not name the first one.
_POPULATE_READ, _DONT_NEED = 22, 4
_PIECE = 8 << 20


class WeightFile:
    """A file without a name, so that nothing is left of it when the process ends, however it ends.

    Args:
        directory: where it is.

    Attributes:
        end: its size.

    Raises:
        RuntimeProblem: nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory, prefix="smelt-weights-")  # noqa: SIM115 - for as long as it is used
        except OSError as error:
            raise RuntimeProblem(
                f"offload_directory: {directory} cannot be written to ({error.strerror}); choose another"
            ) from None
        self.end = 0
        self._maps: list[tuple[int, mmap.mmap]] = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def keep(self, tensor: Tensor) -> Tensor:
        """A weight, in the file.

        Raises:
            RuntimeProblem: the disk is full.
        """
        if tensor.nbytes < _LEAST or tensor.device.type != "cpu":
            return tensor
        tensor = tensor.contiguous()
        raw = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        begin = self.end
        try:
            done = 0
            while done < len(raw):
                done += os.pwrite(self._file.fileno(), raw[done : done + _PIECE], begin + done)
            self.end = begin + -(-len(raw) // _PAGE) * _PAGE
            os.ftruncate(self._file.fileno(), self.end)
        except OSError as error:
            raise RuntimeProblem(
                f"offload_directory: {self._directory} cannot hold {human_bytes(len(raw))} more ({error.strerror}); choose another"
            ) from None
        room = mmap.mmap(self._file.fileno(), len(raw), flags=mmap.MAP_SHARED, offset=begin)
        self._maps.append((begin, room))
        return torch.frombuffer(room, dtype=tensor.dtype).view(tensor.shape)

    def settle(self) -> None:
        """Write what was kept to the disk: pages that were not written cannot be given back."""
        os.fdatasync(self._file.fileno())

    def read(self, begin: int, end: int) -> float:
        """Bring a part into memory. Returns the seconds that it took; other threads go on meanwhile."""
        begun = time.perf_counter()
        for address, count in self._parts(begin, end):
            if self._libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), _POPULATE_READ):
                # Linux before 5.14: it then is in the system's cache.
                for offset in range(begin, end, _PIECE):
                    os.pread(self._file.fileno(), min(_PIECE, end - offset), offset)
                break
        return time.perf_counter() - begun

    def give_back(self, begin: int, end: int) -> None:
        """Let the system use a part's memory for something else."""
        for address, count in self._parts(begin, end):
            self._libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), _DONT_NEED)
        os.posix_fadvise(self._file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)

    def _parts(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Addresses and sizes of the mappings of a part, which is of whole weights."""
        found = []
        for offset, room in self._maps:
            if begin <= offset < end:
                address = ctypes.addressof(ctypes.c_char.from_buffer(room))
                found.append((address, len(room)))
        return found
