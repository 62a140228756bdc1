"""Layers whose weights are not where they are computed: what a model needs of them, and what bringing them takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from ...system.hardware.machine import human_bytes

L = TypeVar("L")
# Of the time.
_HARDLY = 0.1


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

    def since(self, before: StreamCounts) -> StreamCounts:
        """What was counted after some earlier counts."""
        earlier = before.as_data()
        return StreamCounts(**{name: value - earlier[name] for name, value in self.as_data().items()})  # type: ignore[arg-type]

    @property
    def hidden(self) -> bool:
        """Whether steps hardly waited."""
        return self.waiting <= _HARDLY * (self.waiting + self.computing)

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
        if not self.hidden:
            factor = self.reading / max(self.computing, 1e-9)
            found += f"; steps that compute {factor:.1f} times as long, by more sequences or larger pieces of prompts, would hide it"
        return found


def hiding_sequences(loads: Sequence[tuple[int, StreamCounts]]) -> str | None:
    """How many sequences at once hide the reading, as a sentence; None if that cannot be said.

    Args:
        loads: how many sequences were computed at once, in growing order, and what that took.
    """
    per_step = [(count, found) for count, found in loads if found.bytes]
    hidden = next((count for count, found in per_step if found.hidden), None)
    if hidden is not None:
        return f"{hidden} sequences at once hide it"
    if len(per_step) < 2:
        return None
    # A step's computing grows with its sequences, and its reading does not.
    (few, less), (many, more) = per_step[0], per_step[-1]
    reading = more.reading / more.steps
    slope = (more.computing / more.steps - less.computing / less.steps) / (many - few)
    if slope <= 0:
        return None
    return (
        f"about {math.ceil(many + (reading - more.computing / more.steps) / slope):,} sequences at once would hide it"
    )
