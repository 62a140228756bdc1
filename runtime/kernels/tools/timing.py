"""Timing launches on a GPU: medians over graphs of them, on uncached inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import torch

# Bytes of a copy that measures memory bandwidth: more than any cache holds, little compared to an engine.
_COPIED = 1 << 28
_SHORTEST = 1e-3  # seconds of what is timed
_MOST_LAUNCHES = 4096  # in a graph
# Cycles of the device: about half a millisecond, where a launch takes the host some microseconds, and 30.
_ASLEEP, _LONGEST_ASLEEP = 1_000_000, 64_000_000


def seconds(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """The median time of one call.

    Args:
        calls: the same work on different memory, so that inputs are not cached; they are
            captured into one graph, repeated until it takes a millisecond.
        replays: the number of timed replays.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and makes workspaces large enough
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, rounds = _captured(calls, 1), 1
    graph.replay()
    once = _timed(graph)
    if once < _SHORTEST:
        rounds = min(math.ceil(_SHORTEST / max(once, 1e-9)), _MOST_LAUNCHES // len(calls) + 1)
        graph = _captured(calls, rounds)
        graph.replay()
    return median(_timed(graph) for _ in range(replays)) / (rounds * len(calls))


def _captured(calls: Sequence[Callable[[], object]], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _timed(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of a graph on the device.

    On an idle stream the first event is recorded before the graph is launched, so that the launch would be timed.
    So the stream is kept busy until everything is queued; if that was too short, it is repeated for longer.
    """
    cycles = _ASLEEP
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)  # pyright: ignore[reportPrivateUsage]
        start.record()
        graph.replay()
        end.record()
        in_time = not start.query()
        end.synchronize()
        if in_time or cycles >= _LONGEST_ASLEEP:
            return start.elapsed_time(end) / 1000
        cycles *= 4


def device_lives() -> bool:
    """Whether the device still works; after an illegal access it does not work again in this process."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def copies_needed(nbytes: int, device: torch.device, calls: int = 8) -> int:
    """How many inputs of ``nbytes`` to rotate through, so that none stays in the cache until its next turn."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(calls, -(-3 * cache // max(nbytes, 1)))


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.randint(0, 256, (_COPIED,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / seconds([lambda: target.copy_(source)] * 4)


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Operations per second of a large product of random values (zeros run faster)."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds([lambda: a @ b] * 4)
