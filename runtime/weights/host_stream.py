"""Layers whose weights are in host memory and copied to the device while the layers before them compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from ...system.hardware.machine import human_bytes
from ...system.hardware.pinned import pinned_memory
from .offload import L, StreamCounts

# Smaller tensors stay on the device; others begin at multiples.
_LEAST = 1 << 16
_ALIGNED = 256
_BUFFERS = 2


@dataclass(frozen=True)
class _Place:
    """Where a tensor is among its layer's bytes."""

    tensor: Tensor
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def put(self, room: Tensor) -> None:
        """Let the tensor be there."""
        whole = room[self.begin :]
        count = whole.numel() // self.tensor.itemsize * self.tensor.itemsize
        self.tensor.data = whole[:count].view(self.tensor.dtype).as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class _HostLayer:
    weights: Tensor
    places: list[_Place]

    def put(self, room: Tensor) -> None:
        """Let all tensors be there."""
        for place in self.places:
            place.put(room)

    def let_go(self) -> None:
        """Let them be nowhere."""
        for place in self.places:
            place.tensor.data = place.tensor.new_empty(0)


class HostLayers:
    """Layers whose weights are in pinned host memory.

    Args:
        device: where they are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: list[_HostLayer] = []
        self._known = set[int]()

    @property
    def bytes(self) -> int:
        """Of all layers."""
        return sum(layer.weights.numel() for layer in self._layers)

    @property
    def largest(self) -> int:
        """Bytes of the largest layer."""
        return max(layer.weights.numel() for layer in self._layers)

    def build(self, make: Callable[[], L]) -> L:
        """The layer that a function makes on the device; its weights go to the host.

        Raises:
            RuntimeProblem: the host has not enough memory.
        """
        layer = make()
        by_memory: dict[int, list[Tensor]] = {}
        for tensor in _tensors(layer, self._device):
            assert id(tensor) not in self._known, "layers share a tensor"
            self._known.add(id(tensor))
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [each[0].untyped_storage().nbytes() for each in by_memory.values()]
        total = sum(_aligned(size) for size in sizes)
        weights = self._host_memory(total)
        places, begin = list[_Place](), 0
        for tensors, size in zip(by_memory.values(), sizes, strict=True):
            raw = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensors[0].untyped_storage())
            weights[begin : begin + size].copy_(raw)
            for tensor in tensors:
                inside = int(tensor.storage_offset()) * tensor.itemsize
                places.append(_Place(tensor, begin + inside, tuple(tensor.shape), tensor.stride()))
            begin += _aligned(size)
        kept = _HostLayer(weights, places)
        kept.let_go()
        self._layers.append(kept)
        return layer

    def _host_memory(self, count: int) -> Tensor:
        """Pinned memory of the host."""
        problem = RuntimeProblem(
            f"offload is cpu, but the host has no {human_bytes(count)} of memory for one more layer; use a smaller scheme"
        )
        try:
            if self._device.type == "cuda":
                return pinned_memory((count,), torch.uint8, self)
            return torch.empty(count, dtype=torch.uint8, device="cpu")
        except (RuntimeError, MemoryError):
            raise problem from None

    def stream(self, resident: int) -> HostStream:
        """What copies them."""
        for layer in self._layers:  # so that the buffers of one before can go
            layer.let_go()
        return HostStream(self._layers, self._device, resident)


class HostStream:
    """Copies each layer's weights to one of two buffers of the device, or to where they stay.

    Args:
        layers: in order.
        device: where they are computed.
        resident: bytes that may stay there.

    Attributes:
        first: the first layer that does not stay.
        predicted: bytes a second of a first copy.
    """

    def __init__(self, layers: list[_HostLayer], device: torch.device, resident: int) -> None:
        self._layers, self._device = layers, device
        self._clock = _GpuClock(device) if device.type == "cuda" else _CpuClock()
        self.first, kept = 0, 0
        while self.first < len(layers) and kept + layers[self.first].weights.numel() <= resident:
            kept += layers[self.first].weights.numel()
            layers[self.first].put(layers[self.first].weights.to(device))
            self.first += 1
        streamed = layers[self.first :]
        largest = max((layer.weights.numel() for layer in streamed), default=0)
        self._rooms = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        for i, layer in enumerate(streamed):
            layer.put(self._rooms[i % _BUFFERS])
        self._clock.uses(self._rooms)
        self._there = -1  # the layer that was copied last
        self.predicted = self._clock.bandwidth(lambda: self._copied(self.first)) if streamed else 0.0

    def _copied(self, layer: int) -> int:
        weights = self._layers[layer].weights
        room = self._rooms[(layer - self.first) % _BUFFERS]
        room[: weights.numel()].copy_(weights, non_blocking=True)
        self._there = layer
        return weights.numel()

    @property
    def counts(self) -> StreamCounts:
        """What copying has taken so far."""
        return self._clock.counts()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it each layer is reached in turn. What the next step needs first is copied after it."""
        with self._clock.step():
            if self.first < len(self._layers) and self._there != self.first:
                self._clock.copy(lambda: self._copied(self.first))
            yield
        if self.first < len(self._layers):
            self._clock.copy(lambda: self._copied(self.first))

    def reach(self, layer: int) -> None:
        """A layer is to be computed: its weights are there, and the next one's are copied."""
        if layer < self.first:
            return
        self._clock.wait()
        if layer + 1 < len(self._layers):
            self._clock.copy(lambda: self._copied(layer + 1))


class _CpuClock:
    """Copies at once: for tests, where a CPU stands for a GPU."""

    def __init__(self) -> None:
        self._counts = StreamCounts()

    def uses(self, rooms: list[Tensor]) -> None:
        pass

    def bandwidth(self, copy: Callable[[], int]) -> float:
        begun = time.perf_counter()
        return copy() / (time.perf_counter() - begun)

    def copy(self, copy: Callable[[], int]) -> None:
        begun = time.perf_counter()
        self._counts.bytes += copy()
        self._counts.reading += time.perf_counter() - begun
        self._counts.waiting += time.perf_counter() - begun

    def wait(self) -> None:
        pass

    @contextmanager
    def step(self) -> Iterator[None]:
        begun, waited = time.perf_counter(), self._counts.waiting
        yield
        self._counts.steps += 1
        self._counts.computing += time.perf_counter() - begun - (self._counts.waiting - waited)

    def counts(self) -> StreamCounts:
        return self._counts


class _GpuClock:
    """Copies on a stream of its own, after what is queued so far, and times it with events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)
        self._done = self._event()
        self._counts = StreamCounts()
        # By field of the counts: events before and after.
        self._pending: list[tuple[str, Any, Any]] = []

    def uses(self, rooms: list[Tensor]) -> None:
        """Copies there may be under way when nothing else needs them any more."""
        for room in rooms:
            room.record_stream(self._side)

    def bandwidth(self, copy: Callable[[], int]) -> float:
        copy()
        torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        size = copy()
        torch.cuda.synchronize(self._device)
        return size / (time.perf_counter() - begun)

    def copy(self, copy: Callable[[], int]) -> None:
        # The buffer is free once the layers that are queued so far are computed.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            before = self._event()
            self._counts.bytes += copy()
            self._done = self._event()
        self._pending.append(("reading", before, self._done))

    def wait(self) -> None:
        before = self._event()
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._pending.append(("waiting", before, self._event()))

    @contextmanager
    def step(self) -> Iterator[None]:
        self._settle()
        before = self._event()
        yield
        self._counts.steps += 1
        self._pending.append(("computing", before, self._event()))

    def counts(self) -> StreamCounts:
        torch.cuda.synchronize(self._device)
        self._settle()
        return self._counts

    def _settle(self) -> None:
        """Count what has ended."""
        left = []
        for name, before, after in self._pending:
            if not after.query():
                left.append((name, before, after))
                continue
            seconds = before.elapsed_time(after) / 1000
            setattr(self._counts, name, getattr(self._counts, name) + seconds)
            if name == "waiting":  # a step's time includes it
                self._counts.computing -= seconds
        self._pending = left

    def _event(self) -> Any:
        found = torch.cuda.Event(enable_timing=True)
        found.record(torch.cuda.current_stream(self._device))
        return found


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _tensors(layer: object, device: torch.device) -> Iterator[Tensor]:
    """The large tensors on a device that a layer, and Smelt's objects and containers in it, have."""
    seen, left = set[int](), [layer]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            if each.device.type == device.type and each.untyped_storage().nbytes() >= _LEAST:
                yield each
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple):
            left.extend(each)
        elif type(each).__module__.startswith("smelt."):
            left.extend(getattr(each, "__dict__", {}).values())
