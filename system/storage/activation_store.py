"""Hidden states of all calibration windows, on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from ..errors import SmeltError
from .files import disk_error

# A forward pass works on about this many tokens: enough to keep the cores busy, few enough to stay small.
BATCH_TOKENS = 2048
_CPU = torch.device("cpu")


def windows_a_batch(length: int, tokens: int = BATCH_TOKENS) -> int:
    """How many windows of a length belong to one pass over about so many tokens; by default to a forward pass."""
    return max(1, tokens // length)


class ActivationStore:
    """A tensor ``[windows, length, width]`` in a file, read and overwritten batch by batch.

    It is read and written like any file, not mapped: what the system caches of it speeds up the next
    pass, is dropped when memory is short, and never counts as this process's memory.

    Args:
        shape: windows, length and width; kept as an attribute.
        dtype: of the numbers.
        directory: where to put the file; it is removed by :meth:`close`.
        device: where what is read goes; the CPU by default.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        directory: Path,
        device: torch.device = _CPU,
    ) -> None:
        self.shape = shape
        self._dtype = dtype
        self._device = device
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"activations-{uuid4().hex}.bin"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._window = shape[1] * shape[2] * dtype.itemsize

    def batches(self, tokens: int = BATCH_TOKENS) -> Iterator[slice]:
        """Windows that belong to one pass over about so many tokens, in order; by default to a forward pass."""
        windows, length, _ = self.shape
        size = windows_a_batch(length, tokens)
        for start in range(0, windows, size):
            yield slice(start, min(start + size, windows))

    def beside(self, width: int, windows: int | None = None) -> ActivationStore:
        """A new store for other activations of the same tokens, or of another number of windows."""
        count, length, _ = self.shape
        shape = (count if windows is None else windows, length, width)
        return ActivationStore(shape, self._dtype, self._directory, self._device)

    def read(self, batch: slice) -> Tensor:
        """A copy of some windows."""
        start, stop, _ = batch.indices(self.shape[0])
        hidden = torch.empty(stop - start, *self.shape[1:], dtype=self._dtype, device=_CPU)
        _whole(os.preadv, self._file, _bytes(hidden), start * self._window, self._path)
        return hidden.to(self._device)

    def gather(self, windows: Sequence[int]) -> Tensor:
        """A copy of windows that need not lie side by side."""
        hidden = torch.empty(len(windows), *self.shape[1:], dtype=self._dtype, device=_CPU)
        for place, window in enumerate(windows):
            _whole(os.preadv, self._file, _bytes(hidden[place]), window * self._window, self._path)
        return hidden.to(self._device)

    def write(self, batch: slice, hidden: Tensor) -> None:
        """Replace some windows."""
        start, _, _ = batch.indices(self.shape[0])
        try:
            _whole(os.pwritev, self._file, _bytes(hidden.to(_CPU, self._dtype)), start * self._window, self._path)
        except OSError as error:
            raise disk_error(error, self._path, self.shape[0] * self._window) from None

    @property
    def tokens(self) -> int:
        return self.shape[0] * self.shape[1]

    def close(self) -> None:
        """Remove the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._path.unlink(missing_ok=True)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")  # pyright: ignore[reportArgumentType]


def _whole(
    call: Callable[[int, list[memoryview], int], int], file: int, view: memoryview, offset: int, path: Path
) -> None:
    """Transfer all of ``view``; a system moves at most two gigabytes at once."""
    while view:
        moved = call(file, [view], offset)
        if moved == 0:
            raise SmeltError(f"{path}: ended early; another process has changed it")
        view, offset = view[moved:], offset + moved
