"""Statistics of a layer's inputs for rounding methods, accumulated batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# Searches over scales and ranges read all rows of a sample. Half of them give a layer's output error to about 2%,
# by the spread between such halves in smelt-6m at 2 and 4 bits; with long calibration texts, a larger sample would
# cost as much as rounding to nearest.
SAMPLE_ROWS = 1024
_ERROR_ROWS = 512
_TILE = 256


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one layer's inputs.

    Attributes:
        hessian: float32 ``[columns, columns]``, the sum of x xT over tokens divided by their number; None if not requested.
        rows: ``[n, columns]``, an evenly spaced sample of the inputs, in their dtype.
        tokens: the number of inputs; 0 for an expert that no token reached.
        reached: the number of inputs that the router sent, where that is fewer.
        shift: float32 ``[columns, columns]``, the sum of (f - x) xT over tokens divided by their number, where f is
            what the layer reads in the unrounded model; None if not requested, or not known.
        energy: float32 ``[columns]``, each channel's mean square over all tokens; None if neither it nor the Hessian was
            requested.
        low, high: float32 ``[columns]``, each channel's extremes over all tokens, including 0.
    """

    hessian: Tensor | None
    rows: Tensor
    tokens: int
    low: Tensor = field(default_factory=lambda: torch.zeros(0))
    high: Tensor = field(default_factory=lambda: torch.zeros(0))
    reached: int | None = None
    shift: Tensor | None = None
    energy: Tensor | None = None

    @property
    def peak(self) -> Tensor:
        """Each channel's largest magnitude."""
        return torch.maximum(self.high, -self.low)


class ProcessGroup(Protocol):
    """Processes that each have a share of the inputs."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum over all processes."""
        ...

    def all_gather(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The values of all processes, in rank order."""
        ...


class StatsCollector:
    """Accumulates :class:`LayerStats` from the inputs of a layer, in order.

    Each batch is sampled separately, from a row on that depends on what is in it: the sample does not depend on how batches are distributed,
    and no position of a window is preferred. The first one is unlike all others in many models.

    Args:
        columns: of the inputs.
        expected_tokens: the most that will come, over all processes.
        hessian: whether to compute it.
        shift: whether to compute it; each batch then comes with the unrounded model's inputs.
        energy: whether to compute it without the Hessian, whose diagonal it is.
    """

    def __init__(
        self, columns: int, expected_tokens: int, *, hessian: bool, shift: bool = False, energy: bool = False
    ) -> None:
        self._hessian = _ProductSum(columns, symmetric=True) if hessian else None
        self._shift = _ProductSum(columns, symmetric=False) if shift else None
        self._rows: Tensor | None = None
        self._filled = 0
        self._stride = max(1, -(-expected_tokens // SAMPLE_ROWS))
        # A batch of at least SAMPLE_ROWS tokens yields at most one row more than its share, and there are no more such
        # batches than the stride.
        self._most = min(SAMPLE_ROWS + self._stride, expected_tokens)
        self._columns = columns
        self._tokens = 0
        self._low, self._high = torch.zeros(columns), torch.zeros(columns)
        self._squares = torch.zeros(columns, dtype=torch.float64) if energy and not hessian else None

    def add(self, inputs: Tensor, computed: Tensor | None = None, unrounded: Tensor | None = None) -> None:
        """Add a batch of inputs.

        Args:
            inputs: ``[..., columns]``.
            computed: the rounded inputs, where the layer rounds its inputs and the Hessian should reflect it.
            unrounded: for ``shift``: the layer's inputs for the same tokens in the unrounded model.
        """
        rows = inputs.reshape(-1, inputs.shape[-1])
        if len(rows):
            # On a CPU, aminmax takes seven times as long as amin and amax.
            torch.minimum(self._low, rows.amin(dim=0).float(), out=self._low)
            torch.maximum(self._high, rows.amax(dim=0).float(), out=self._high)
        if self._rows is None:
            # Allocated once: small long-lived tensors between large short-lived ones fragment the memory.
            self._rows = rows.new_empty(self._most, self._columns)
        sampled = rows[self._begin(rows) :: self._stride][: self._most - self._filled]
        self._rows[self._filled : self._filled + len(sampled)] = sampled
        self._filled += len(sampled)
        if self._squares is not None:
            self._squares += rows.float().square().sum(0, dtype=torch.float64)
        if self._hessian is not None:
            read = rows if computed is None else computed.reshape(rows.shape)
            flat = read.float()
            with _exact_products(read.dtype):
                self._hessian.add(flat, flat)
            if self._shift is not None:
                assert unrounded is not None
                self._shift.add(unrounded.reshape(rows.shape).float() - flat, flat)
        self._tokens += rows.shape[0]

    def _begin(self, rows: Tensor) -> int:
        """Which row is the first of a batch's sample: by the bits of its last row, which any device has alike."""
        if self._stride == 1 or not len(rows):
            return 0
        mixed = rows[-1].contiguous().view(torch.uint8).long()
        places = torch.arange(1, len(mixed) + 1, device=mixed.device)
        return int((mixed * places).sum()) % min(self._stride, len(rows))

    def result(self, others: ProcessGroup | None = None) -> LayerStats:
        """The statistics over all processes. The collector must not be used afterwards."""
        if others is not None:
            self._add(others)
        count = max(1, self._tokens)
        hessian = None if self._hessian is None else self._hessian.over(count)
        shift = None if self._shift is None else self._shift.over(count)
        energy = None if hessian is None else hessian.diagonal()
        if self._squares is not None:
            energy = (self._squares / count).float()
        rows = torch.zeros(0, self._columns) if self._rows is None else self._rows[: self._filled]
        return LayerStats(hessian, rows, self._tokens, self._low, self._high, shift=shift, energy=energy)

    def _add(self, others: ProcessGroup) -> None:
        mine = {"tokens": torch.tensor(self._tokens), "low": self._low, "high": self._high}
        if self._rows is not None:
            mine["rows"] = self._rows[: self._filled]
        found = others.all_gather(mine)
        self._tokens = sum(int(each["tokens"]) for each in found)
        self._low = torch.stack([each["low"] for each in found]).amin(0)
        self._high = torch.stack([each["high"] for each in found]).amax(0)
        rows = [each["rows"] for each in found if "rows" in each]
        if rows:
            self._rows = rows[0] if len(rows) == 1 else torch.cat(rows)[: self._most]
            self._filled = len(self._rows)
        for products in (self._hessian, self._shift):
            for strip in [] if products is None else products.strips:
                others.sum_(strip)
        if self._squares is not None:
            others.sum_(self._squares)


class _ProductSum:
    """A sum of products ``aT b`` over batches.

    In float64, so that neither the order of batches nor the number of processes matters; in strips of
    rows, so that no product or sum is ever in memory twice.

    Args:
        columns: of ``a`` and of ``b``.
        symmetric: ``a`` is ``b``, and only the part of each strip right of the diagonal is accumulated.

    Attributes:
        strips: the sums so far.
    """

    def __init__(self, columns: int, *, symmetric: bool) -> None:
        self._columns = columns
        self._symmetric = symmetric
        self.strips = [
            torch.zeros(min(_TILE, columns - start), columns - start * symmetric, dtype=torch.float64)
            for start in range(0, columns, _TILE)
        ]

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the rows of a batch, both float32."""
        for i, strip in enumerate(self.strips):
            strip += a[:, i * _TILE : (i + 1) * _TILE].T @ b[:, i * _TILE * self._symmetric :]

    def over(self, count: int) -> Tensor:
        """The sum divided by ``count``, in float32. The strips are freed."""
        whole = torch.empty(self._columns, self._columns)
        for start in range(0, self._columns, _TILE):
            whole[start : start + _TILE, start * self._symmetric :] = self.strips.pop(0).div_(count)
        for stop in range(_TILE, self._columns if self._symmetric else 0, _TILE):
            whole[stop:, stop - _TILE : stop] = whole[stop - _TILE : stop, stop:].T
        return whole


@contextmanager
def _exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Let a CPU multiply float32 copies of bfloat16 values in bfloat16, in half the time.

    The products are exact in float32, in which they are summed either way.
    """
    precision = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = precision.fp32_precision
    if dtype == torch.bfloat16:
        precision.fp32_precision = "bf16"
    try:
        yield
    finally:
        precision.fp32_precision = before


def weight_error(weight: Tensor, quantized: Tensor) -> float:
    """Relative error of a weight, ``|W-Q| / |W|``."""
    lost, whole = squared_error(weight, quantized)
    return (lost / whole) ** 0.5 if whole else 0.0


def squared_error(weight: Tensor, quantized: Tensor) -> tuple[float, float]:
    """The sums of squares of ``W - Q`` and of ``W``, to be summed over parts of a weight."""
    wide = weight.float()
    return (quantized.float() - wide).square_().sum().item(), wide.square().sum().item()


def output_error(weight: Tensor, quantized: Tensor, stats: LayerStats) -> float | None:
    """Relative error of the layer's output on its own inputs, ``|X(W-Q)| / |XW|``; None without inputs.

    The difference is taken before the product, so that computing in the inputs' dtype is enough.
    """
    rows = stats.rows[:: max(1, len(stats.rows) // _ERROR_ROWS)]
    if rows.shape[0] == 0:
        return None
    size = (rows @ weight.to(rows.dtype).T).float().norm()
    if size == 0:
        return 0.0
    difference = weight.float() - quantized.float()
    return ((rows @ difference.to(rows.dtype).T).float().norm() / size).item()
