"""Timing launches on a GPU: whole graphs of them, on inputs that no cache holds, medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

# Bytes that a copy moves to find the memory's rate: more than any cache holds, little beside an engine.
_COPIED = 1 << 28


def seconds(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """The median time of one call.

    Args:
        calls: the same work on different memory, so that none finds its inputs in the cache; they are
            captured into one graph, whose start costs little beside them.
        replays: how often that is timed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and makes workspaces large enough
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / len(calls))
    return median(found)


def device_lives() -> bool:
    """Whether the device still computes; after an illegal access it never does again in this process."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def copies_needed(nbytes: int, device: torch.device, calls: int = 8) -> int:
    """How many inputs of ``nbytes`` to take turns with, so that the cache holds none until its next turn."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(calls, -(-3 * cache // max(nbytes, 1)))


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randint(0, 256, (_COPIED,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / seconds([lambda: target.copy_(source)] * 4)


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Operations a second of a large product of random numbers (zeros run faster)."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds([lambda: a @ b] * 4)
