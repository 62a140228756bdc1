"""How many threads the kernels' loops use, and that nothing they compute depends on it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from smelt.quant.activations import ActivationRounding
from smelt.runtime.native.linears import CodesLinear
from smelt.runtime.weights.matrix import Matrix
from torch import Tensor

from .random_matrix import BY_TOKEN

MS = 1_000_000


def _loops(threads: Any, begun: int, times: list[float], of: int = 2) -> int:
    """Loops of 100 items, of which the first thread computed its share in 1 ms, that took these milliseconds; when they are over."""
    for time in times:
        begun += int(time * MS)
        threads.seen(most=of, threads=of, count=100 * of, piece=1, mine=100, busy=MS, time=int(time * MS), at=begun)
    return begun


def test_interruptions_now_and_then_cost_no_thread(compiled: ModuleType) -> None:
    threads = compiled.Threads()
    at = _loops(threads, 10**12, ([1.05] * 30 + [4.0]) * 20)
    assert threads.count(2, at) == 2


def test_a_thread_that_keeps_the_others_waiting_is_left_out_and_tried_again(compiled: ModuleType) -> None:
    threads, at = compiled.Threads(), 10**12

    def pause() -> int:
        nonlocal at
        begun = at = _loops(threads, at, [4.0])
        assert threads.count(2, at) == 1
        while threads.count(2, at) == 1:
            at += MS
        return (at - begun) // MS

    pauses = [pause() for _ in range(6)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    at += 1000 * MS
    assert pause() == pauses[0]


def test_of_many_threads_one_is_left_out_at_a_time(compiled: ModuleType) -> None:
    threads = compiled.Threads()
    assert threads.count(16, 10**12) == 16
    assert threads.count(16, _loops(threads, 10**12, [4.0], of=16)) == 15


def test_a_main_thread_that_shares_its_core_gains_nothing(compiled: ModuleType) -> None:
    """Its own time to compute counts, not the time in which the other one computed there."""
    threads, at = compiled.Threads(), 10**12
    for _ in range(100):
        at += 3 * MS
        threads.seen(most=2, threads=2, count=200, piece=1, mine=100, busy=MS, time=3 * MS, at=at)
    assert threads.count(2, at) == 1


@pytest.mark.parametrize(("bits", "inputs"), [(4, None), (8, None), (8, BY_TOKEN)])
def test_a_row_is_the_same_whatever_runs_beside(
    compiled: ModuleType, monkeypatch: pytest.MonkeyPatch, bits: int, inputs: ActivationRounding | None
) -> None:
    """Among any rows of the same path, at any place, on any number of threads."""
    generator = torch.Generator().manual_seed(0)
    columns, outputs, group = 256, 200, 256 if inputs else 128
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (outputs, columns), generator=generator).to(torch.int8)
    scale = torch.rand(outputs, columns // group, generator=generator).bfloat16()
    x = torch.randn(45, columns, generator=generator).bfloat16()
    matrix = Matrix(codes, f"int{bits}", bits, scale, None, inputs)
    for exact in (False, True):
        linear = CodesLinear(compiled, matrix, None, exact)
        few = 0 if inputs else 45 if exact else 2
        for path in (range(1, few + 1), range(few + 1, 46)):
            seen: Tensor | None = None
            for rows in path:
                for threads in (1, 3):
                    monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                    last = linear(x[45 - rows :])
                    seen = last[-1] if seen is None else seen
                    assert torch.equal(last[-1], seen)
                    assert rows == 1 or torch.equal(linear(x[45 - rows :].flip(0))[0], seen)
