"""Memory that launches of one stream share: partial sums, and who has arrived."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Grows when a larger launch is prepared, never while one runs in a captured graph.

    Attributes:
        parts: float32 for partial sums; what it holds means nothing between launches.
        arrived: counters, which each launch leaves at zero.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, parts: int, tiles: int) -> tuple[Tensor, Tensor]:
        """At least so many partial sums and counters."""
        if self.parts.numel() < parts:
            self._must_not_be_captured()
            self.parts = torch.empty(parts, dtype=torch.float32, device=self._device)
        if self.arrived.numel() < tiles:
            self._must_not_be_captured()
            self.arrived = torch.zeros(tiles, dtype=torch.int32, device=self._device)
        return self.parts, self.arrived

    def _must_not_be_captured(self) -> None:
        # A captured graph would keep the old memory's address, and a later launch would free that.
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a workspace was too small while a CUDA graph was captured; run the step once before")


_OF_DEVICE: dict[torch.device, Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """The device's own workspace, for launches of its one stream."""
    if device not in _OF_DEVICE:
        _OF_DEVICE[device] = Workspace(device)
    return _OF_DEVICE[device]
