"""RoPE cosines and sines where captured steps expect them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoder.parts.rope import Rotations
from ..kernels.rows.rotate_and_store import RotaryTables


class RotaryBuffers:
    """Tables of all positions, or of each step where frequencies depend on the length.

    Args:
        rotations: of a model.
        dtype, device: of the tables.
        tokens: the most of a step.
        longest: the most of a sequence.

    Attributes:
        by_length: whether each step has its own, which :meth:`fill` sends.
    """

    def __init__(
        self, rotations: Rotations, dtype: torch.dtype, device: torch.device, *, tokens: int, longest: int
    ) -> None:
        self._rotations = rotations
        self.by_length = rotations.by_length
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        with device:
            if not self.by_length:
                self._tables = {name: _flat(table) for name, table in rotations.tables(longest).items()}
                return
            probe = rotations.of(torch.zeros(1, dtype=torch.int64), [(1, 1)])
            for name, (cosine, _) in probe.items():
                shape = (tokens, cosine.shape[-1])
                self._tables[name] = (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
            self._each = torch.arange(tokens, dtype=torch.int32)

    def fill(self, positions: Tensor, lengths: list[tuple[int, int]]) -> None:
        """Send a step's values, computed on the host from its positions."""
        for name, table in self._rotations.of(positions, lengths).items():
            for kept, new in zip(self._tables[name], _flat(table), strict=True):
                # A rope of one length may have its table on the device.
                pinned = new.pin_memory() if kept.device.type == "cuda" and new.device.type == "cpu" else new
                kept[: len(new)].copy_(pinned, non_blocking=True)

    def of(self, positions: Tensor) -> dict[str, RotaryTables]:
        """A step's values."""
        rows = self._each[: len(positions)] if self.by_length else positions
        return {name: RotaryTables(cosine, sine, rows) for name, (cosine, sine) in self._tables.items()}


def _flat(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return table[0].flatten(1).contiguous(), table[1].flatten(1).contiguous()
