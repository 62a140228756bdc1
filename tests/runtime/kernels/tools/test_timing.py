"""That a launch is timed, and not what the host needs to launch it, on a stand-in for a device and its queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from smelt.runtime.kernels.tools.timing import seconds

US = 1e-6
CALL = 5 * US  # of the device
RECORD = US  # of the host


class Device:
    """A queue that the host fills and a device that empties it, each with a clock of its own."""

    def __init__(self, launch: float) -> None:
        self.host = self.free = 0.0
        self.launch, self.captured = launch, None

    def run(self, takes: float) -> None:
        """Work begins when it is queued and what came before is done."""
        self.free = max(self.free, self.host) + takes

    def work(self) -> None:
        if self.captured is None:
            self.host += self.launch
            self.run(CALL)
        else:
            self.captured.calls += 1

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        self.captured = graph
        yield
        self.captured = None

    def replay(self, calls: int) -> None:
        self.host += self.launch
        self.run(calls * CALL)

    def sleep(self, cycles: int) -> None:
        self.host += RECORD
        self.run(cycles / 2e9)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Device]:
    def make(launch: float) -> Device:
        device = Device(launch)

        class Graph:
            calls = 0

            def replay(self) -> None:
                device.replay(self.calls)

        class Event:
            at = 0.0

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.host += RECORD
                self.at = max(device.free, device.host)

            def query(self) -> bool:
                return self.at <= device.host

            def synchronize(self) -> None:
                device.host = max(device.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return 1000 * (end.at - self.at)

        class Stream:
            def wait_stream(self, other: Stream) -> None:
                pass

        stubs = {
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": Graph,
            "graph": device.capture,
            "Event": Event,
            "_sleep": device.sleep,
        }
        for name, stub in stubs.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        return device

    return make


@pytest.mark.parametrize("launch", [10 * US, 2000 * US])
@pytest.mark.parametrize("calls", [1, 8])
def test_launching_is_not_timed(on_device: Callable[[float], Device], launch: float, calls: int) -> None:
    device = on_device(launch)
    assert seconds([device.work] * calls) == pytest.approx(CALL, rel=0.01)


def test_short_work_is_repeated(on_device: Callable[[float], Device], monkeypatch: pytest.MonkeyPatch) -> None:
    device, timed = on_device(10 * US), list[int]()
    replay = device.replay
    monkeypatch.setattr(device, "replay", lambda calls: (timed.append(calls), replay(calls)))
    seconds([device.work] * 8, replays=3)
    assert min(timed[-3:]) * CALL >= 1e-3
