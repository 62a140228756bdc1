"""Hidden states of all calibration windows, in memory or on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from .safetensors_file import disk_error

# A forward pass works on about this many tokens: enough to keep the cores busy, few enough to stay small.
BATCH_TOKENS = 2048
# Activations above this size go to the disk.
SPILL_BYTES = 256 << 20


class ActivationStore:
    """A tensor ``[windows, length, width]`` that is read and overwritten batch by batch.

    Args:
        shape: windows, length and width.
        dtype: of the numbers.
        spill: the directory of a file to keep them in if they are large. It is mapped, so that the
            system can drop its pages when memory is short.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, spill: Path) -> None:
        large = shape[0] * shape[1] * shape[2] * dtype.itemsize > SPILL_BYTES
        self._spill = spill
        self._path = spill / f"activations-{uuid4().hex}.bin" if large else None
        if self._path is None:
            self._data = torch.empty(shape, dtype=dtype)
        else:
            count = shape[0] * shape[1] * shape[2]
            _reserve(self._path, count * dtype.itemsize)
            self._data = torch.from_file(str(self._path), shared=True, size=count, dtype=dtype).view(shape)

    def batches(self) -> Iterator[slice]:
        """Windows that belong to one forward pass, in order."""
        windows, length, _ = self._data.shape
        size = max(1, BATCH_TOKENS // length)
        for start in range(0, windows, size):
            yield slice(start, min(start + size, windows))

    def beside(self, width: int) -> ActivationStore:
        """A new store for other activations of the same tokens."""
        windows, length, _ = self._data.shape
        return ActivationStore((windows, length, width), self._data.dtype, self._spill)

    def read(self, batch: slice) -> Tensor:
        return self._data[batch]

    def write(self, batch: slice, hidden: Tensor) -> None:
        self._data[batch] = hidden

    @property
    def tokens(self) -> int:
        return self._data.shape[0] * self._data.shape[1]

    def close(self) -> None:
        """Forget the numbers, and remove the file behind them."""
        self._data = torch.empty(0, 0, 0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _reserve(path: Path, size: int) -> None:
    """Take the disk space now: a mapped file that runs out of it later kills the process."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise disk_error(error, path, size) from None
