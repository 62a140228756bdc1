"""Sums of ranks on one machine through memory that they share: gloo takes milliseconds where this takes microseconds."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor

_PLACE = "/dev/shm"
# Bytes of a part; longer tensors are summed in pieces.
_ROOM = 1 << 20
# While others are waited for, how often it is looked whether they live.
_LOOK_NANOSECONDS = 50_000_000
_TYPES = (torch.bfloat16, torch.float32)


class SharedMemory:
    """Memory of a group of ranks, mapped in each of them.

    Args:
        file: of the memory.
        kernels: Smelt's compiled ones.
        rank: this process' number.
        count: how many ranks there are.
    """

    def __init__(self, file: Path, kernels: Any, rank: int, count: int) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)
        # torch's view knows the address, which Python does not tell.
        self._view = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._kernels = kernels
        self._shared = kernels.Shared(self._view.data_ptr(), rank, count, _ROOM)
        self._turn = 0

    @staticmethod
    def file_of(kernels: Any, count: int) -> Path:
        """A new file for so many ranks; whoever has it open keeps the memory when it is deleted."""
        handle, name = tempfile.mkstemp(prefix="smelt-", dir=_PLACE if os.access(_PLACE, os.W_OK) else None)
        try:
            os.posix_fallocate(handle, 0, count * (kernels.SHARED_MARK + 2 * _ROOM))
        except OSError:
            Path(name).unlink()
            raise
        finally:
            os.close(handle)
        return Path(name)

    @classmethod
    def of(cls, ranks: Any, kernels: Any) -> Self | None:
        """The memory of a group. All of its ranks call it.

        Args:
            ranks: the group: :class:`~smelt.runtime.parallel.ranks.ConnectedRanks` of one machine.
            kernels: Smelt's compiled ones; None if there are none here.

        Returns:
            None if a rank has no kernels, or cannot share memory.
        """
        file, found = None, None
        if all(ranks.gather_data(kernels is not None)):
            with contextlib.suppress(OSError):
                file = cls.file_of(kernels, ranks.count) if ranks.rank == 0 else None
        try:
            name = ranks.broadcast_data(None if file is None else str(file))
            if name is not None:
                with contextlib.suppress(OSError):
                    found = cls(Path(name), kernels, ranks.rank, ranks.count)
            everywhere = all(ranks.gather_data(found is not None))
        finally:
            if file is not None:
                file.unlink()
        return found if everywhere else None

    def takes(self, tensor: Tensor) -> bool:
        """Whether it sums such tensors."""
        return tensor.dtype in _TYPES

    def all_reduce(self, tensor: Tensor, look: Callable[[], None]) -> None:
        """The sum over all ranks, in place, in float32 and in the order of ranks: the same bits for all.

        Args:
            tensor: contiguous.
            look: called now and then while others are waited for; raises what ends this.
        """
        wide = tensor.dtype == torch.float32
        for piece in tensor.view(-1).split(_ROOM // tensor.itemsize):
            self._turn += 1
            self._kernels.share_part(self._shared, self._turn, piece.data_ptr(), piece.nbytes)
            while not self._kernels.sum_parts(
                self._shared, self._turn, piece.data_ptr(), piece.numel(), wide, _LOOK_NANOSECONDS
            ):
                look()


class Others:
    """The processes of other ranks on this machine.

    Args:
        pids: of all ranks, by rank.
    """

    def __init__(self, pids: list[int]) -> None:
        self._processes = {rank: psutil.Process(pid) for rank, pid in enumerate(pids) if pid != os.getpid()}

    def ended(self) -> int | None:
        """The rank of one that has ended."""
        for rank, process in self._processes.items():
            try:
                if not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    return rank
            except psutil.NoSuchProcess:
                return rank
        return None
