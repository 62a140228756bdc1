"""Memory shared by the launches of one stream: partial sums and arrival counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Workspace:
    """Grows when a larger launch is prepared, and keeps its old memory: a captured graph may still write there.

    Attributes:
        parts: float32 for partial sums; its contents are meaningless between launches.
        arrived: counters, which each launch leaves at zero.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgrown: list[Tensor] = []
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, parts: int, tiles: int) -> tuple[Tensor, Tensor]:
        """Reserve at least this many partial sums and counters."""
        if self.parts.numel() < parts:
            self.parts = self._grown(self.parts, torch.empty(_rounded(parts), dtype=torch.float32, device=self._device))
        if self.arrived.numel() < tiles:
            self.arrived = self._grown(
                self.arrived, torch.zeros(_rounded(tiles), dtype=torch.int32, device=self._device)
            )
        return self.parts, self.arrived

    def _grown(self, before: Tensor, after: Tensor) -> Tensor:
        # During capture memory comes from the graph's pool, and zeros would be written at replay only.
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a workspace was too small while a CUDA graph was captured; run the step once before")
        if before.numel():
            self._outgrown.append(before)
        return after


def parts_allowed(split: int, steps: int) -> int:
    """How many programs may share a tile's columns: at most the number of iterations; on AMD's GPUs one (see targets.py).

    Raises:
        ValueError: the split is not yet chosen by :func:`tile.filling`.
    """
    if split < 1:
        raise ValueError("a launch needs at least one program")
    return 1 if torch.version.hip is not None else min(split, steps)


def _rounded(count: int) -> int:
    """The next power of two, so that all outgrown memory is less than the memory in use."""
    return 1 << max(count - 1, 0).bit_length()


_OF_DEVICE: dict[torch.device, Workspace] = {}


@contextmanager
def set_apart() -> Iterator[None]:
    """Give launches inside separate workspaces: their tensors may have no memory."""
    kept = dict(_OF_DEVICE)
    _OF_DEVICE.clear()
    try:
        yield
    finally:
        _OF_DEVICE.clear()
        _OF_DEVICE.update(kept)


def workspace(device: torch.device) -> Workspace:
    """The device's own workspace, for launches of its one stream."""
    if device not in _OF_DEVICE:
        _OF_DEVICE[device] = Workspace(device)
    return _OF_DEVICE[device]
