"""What a rounding method may know of a layer's inputs, gathered batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Enough rows that a layer's output error is known to about 2%, few enough to cost nothing.
SAMPLE_ROWS = 1024
_TILE = 256


@dataclass(frozen=True)
class LayerStats:
    """Inputs of one layer, summed up.

    Attributes:
        hessian: float32 ``[columns, columns]``, the sum of x xT over tokens divided by their number; None if not asked for.
        rows: float32 ``[n, columns]``, an even sample of the inputs themselves.
        tokens: how many inputs were seen; 0 for an expert that no token reached.
    """

    hessian: Tensor | None
    rows: Tensor
    tokens: int


class StatsCollector:
    """Accumulates :class:`LayerStats` from the inputs of a layer, in the order they come."""

    def __init__(self, columns: int, expected_tokens: int, *, hessian: bool) -> None:
        self._hessian = torch.zeros(columns, columns) if hessian else None
        self._rows: list[Tensor] = []
        self._stride = max(1, -(-expected_tokens // SAMPLE_ROWS))
        self._columns = columns
        self._tokens = 0

    def add(self, inputs: Tensor) -> None:
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        first = -self._tokens % self._stride
        self._rows.append(flat[first :: self._stride].clone())
        if self._hessian is not None:
            # x xT is symmetric: only the blocks on and above the diagonal are computed, the rest is mirrored at the end.
            for start in range(0, self._columns, _TILE):
                part = flat[:, start : start + _TILE]
                self._hessian[start : start + _TILE, start:].addmm_(part.T, flat[:, start:])
        self._tokens += flat.shape[0]

    def result(self) -> LayerStats:
        """The statistics so far. The collector must not be used afterwards."""
        rows = torch.cat(self._rows) if self._rows else torch.zeros(0, self._columns)
        if self._hessian is not None and self._tokens:
            for start in range(0, self._columns, _TILE):
                stop = start + _TILE
                self._hessian[stop:, start:stop] = self._hessian[start:stop, stop:].T
            self._hessian /= self._tokens
        return LayerStats(self._hessian, rows, self._tokens)


def output_error(weight: Tensor, quantized: Tensor, stats: LayerStats) -> float | None:
    """Relative error of the layer's output on its own inputs, ``|X(W-Q)| / |XW|``; None without inputs."""
    if stats.rows.shape[0] == 0:
        return None
    reference = stats.rows @ weight.float().T
    size = reference.norm()
    if size == 0:
        return 0.0
    return ((reference - stats.rows @ quantized.float().T).norm() / size).item()
