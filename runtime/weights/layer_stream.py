"""Layers whose weights are read while the layers before them compute (ZeRO-Inference's way)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ...system.hardware.pages import weights_kept_by
from .offload import L, StreamCounts
from .weight_file import WeightFile


class DiskLayers:
    """Layers whose weights are in a file.

    Args:
        directory: where it is.

    Raises:
        RuntimeProblem: nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self._file = WeightFile(directory)
        self._spans: list[tuple[int, int]] = []

    @property
    def bytes(self) -> int:
        """Of all layers."""
        return self._file.end

    @property
    def largest(self) -> int:
        """Bytes of the largest layer."""
        return max(map(_size, self._spans))

    def build(self, make: Callable[[], L]) -> L:
        """The layer that a function makes; its weights go to the file, and not to memory."""
        begin = self._file.end
        with weights_kept_by(self._file.keep):
            layer = make()
        self._file.settle()
        self._file.give_back(begin, self._file.end)
        self._spans.append((begin, self._file.end))
        return layer

    def stream(self, resident: int) -> LayerStream:
        """What reads them."""
        return LayerStream(self._file, self._spans, resident)


class LayerStream:
    """Brings each layer's weights into memory before it computes, and gives back those of the one before.

    Args:
        file: that holds all layers' weights.
        spans: where each layer's weights begin and end.
        resident: bytes that may stay in memory from step to step; as many layers stay as fit, the first ones.

    Attributes:
        counts: what reading has taken.
        first: the first layer that does not stay.
        predicted: bytes a second of a first reading.
    """

    def __init__(self, file: WeightFile, spans: list[tuple[int, int]], resident: int) -> None:
        self._file, self._spans = file, spans
        self.counts = StreamCounts()
        kept = 0
        self.first = 0
        while self.first < len(spans) and kept + _size(spans[self.first]) <= resident:
            kept += _size(spans[self.first])
            self.first += 1
        if self.first < len(spans):
            for span in spans[self.first :]:
                file.give_back(*span)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="smelt-offload")
        self._next: tuple[int, Future[float]] | None = None
        self._waited = 0.0
        self.predicted = _size(spans[self.first]) / file.read(*spans[self.first]) if self.streams else 0.0

    @property
    def streams(self) -> bool:
        """Whether there are layers that do not stay."""
        return self.first < len(self._spans)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it each layer is reached in turn. What the next step needs first is read after it."""
        begun, self._waited = time.perf_counter(), 0.0
        if self.streams and self._next is None:
            self._read(self.first)
        try:
            yield
        except BaseException:
            if self._next is not None:
                self._next[1].result()
                self._next = None
            raise
        self.counts.steps += 1
        self.counts.waiting += self._waited
        self.counts.computing += time.perf_counter() - begun - self._waited
        if self.streams:
            self._file.give_back(*self._spans[-1])
            self._read(self.first)

    def reach(self, layer: int) -> None:
        """A layer is to be computed: its weights are there, and the next one's are read."""
        if layer < self.first:
            return
        if layer > self.first:
            self._file.give_back(*self._spans[layer - 1])
        assert self._next is not None
        number, reading = self._next
        assert number == layer
        begun = time.perf_counter()
        seconds = reading.result()
        self._waited += time.perf_counter() - begun
        self.counts.reading += seconds
        self.counts.bytes += _size(self._spans[layer])
        self._next = None
        if layer + 1 < len(self._spans):
            self._read(layer + 1)

    def _read(self, layer: int) -> None:
        self._next = layer, self._pool.submit(self._file.read, *self._spans[layer])


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]
