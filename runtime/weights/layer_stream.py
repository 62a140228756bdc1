"""Layers whose weights are read while the layers before them compute (ZeRO-Inference's way)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from ...system.machine import human_bytes
from .weight_file import WeightFile


@dataclass
class StreamCounts:
    """What reading has taken so far.

    Attributes:
        steps: that were computed.
        bytes: that were read.
        reading: seconds of reading.
        waiting: seconds for which a layer waited for its weights.
        computing: seconds of everything else.
    """

    steps: int = 0
    bytes: int = 0
    reading: float = 0.0
    waiting: float = 0.0
    computing: float = 0.0

    def as_data(self) -> dict[str, float]:
        """As plain data."""
        return asdict(self)

    @property
    def bandwidth(self) -> float:
        """Bytes a second while something was read."""
        return self.bytes / self.reading if self.reading else 0.0

    def sentence(self, predicted: float) -> str:
        """For messages.

        Args:
            predicted: bytes a second that were expected.
        """
        if not self.bytes:
            return "all layers stay in memory"
        total = self.waiting + self.computing
        found = (
            f"{human_bytes(self.bytes // self.steps)} of weights were read for each of {self.steps} steps, at"
            f" {human_bytes(int(self.bandwidth))}/s ({human_bytes(int(predicted))}/s predicted); {self.waiting / total:.0%} of the time steps waited for them"
        )
        if self.waiting > 0.1 * total:
            factor = self.reading / max(self.computing, 1e-9)
            found += f"; steps that compute {factor:.1f} times as long, by more sequences or larger pieces of prompts, would hide it"
        return found


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
