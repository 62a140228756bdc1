"""Layers whose weights are not where they are computed: what a model needs of them, and what bringing them takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from ...system.machine import human_bytes

L = TypeVar("L")


class LayersStream(Protocol):
    """Brings each layer's weights before it computes.

    Attributes:
        first: the first layer whose weights do not stay there.
        predicted: bytes a second of a first reading.
    """

    first: int
    predicted: float

    @property
    def counts(self) -> StreamCounts:
        """What it has taken so far."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Within it each layer is reached in turn."""
        ...

    def reach(self, layer: int) -> None:
        """A layer is to be computed: its weights are there, and the next one's are on their way."""
        ...


class OffloadedLayers(Protocol):
    """Where layers' weights are kept."""

    @property
    def bytes(self) -> int:
        """Of all layers."""
        ...

    @property
    def largest(self) -> int:
        """Bytes of the largest layer."""
        ...

    def build(self, make: Callable[[], L]) -> L:
        """The layer that a function makes; its weights go there."""
        ...

    def stream(self, resident: int) -> LayersStream:
        """What brings them.

        Args:
            resident: bytes that may stay where they are computed from step to step; as many layers stay as fit, the first ones.
        """
        ...


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
