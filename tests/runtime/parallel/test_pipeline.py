"""Models whose layers are divided between stages, and each layer between ranks besides."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smelt.runtime.decoder.parallel.pipeline import Result, equal_pieces, pipelined
from smelt.runtime.decoder.parallel.staged_states import StagedStates
from smelt.runtime.decoder.parts.batch import Batch, Run
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.engine.setup.loading import operators_for
from smelt.runtime.parallel.stages import ConnectedStages, divided
from torch import Tensor

from ...compress.coded import compressed
from ...tiny import CONFIGS, from_transformers
from ..drive import logits_in_pieces
from .thread_ranks import CountingRanks, on_ranks

PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (75, 6)]
STEPS = [[(0, 40), (1, 4)], [(0, 33)], [(0, 1), (1, 1)], [(0, 1)], [(1, 1)]]


def piped(
    path: Path, tp: int, pp: int, operators: Operators | None = None, steps: list[list[tuple[int, int]]] = STEPS
) -> list[Tensor]:
    """Both prompts' logits, which the first rank gets."""

    def work(world: CountingRanks) -> list[Tensor]:
        place = divided(world, tp, pp)
        return logits_in_pieces(path, PROMPTS, steps, operators, ranks=place.ranks, stages=place.stages)

    return on_ranks(tp * pp, work)[0]


@pytest.mark.few(6)
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_logits_are_those_of_transformers(tiny: Callable[..., Path], architecture: str) -> None:
    path = tiny(architecture)
    model = from_transformers(path)
    for prompt, found in zip(PROMPTS, piped(path, 1, 2), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


class _InOrder:
    """Connections as NCCL's: what two ranks send each other goes one after the other, and a send ends when it is received."""

    def __init__(
        self, rank: int, pairs: dict[tuple[int, int], queue.Queue[Tensor]], ends: dict[tuple[int, int], Any]
    ) -> None:
        self._rank, self._pairs, self._ends = rank, pairs, ends
        self._streams: dict[int, ThreadPoolExecutor] = {}

    def _after_others(self, other: int, move: Callable[[], None]) -> Any:
        stream = self._streams.setdefault(other, ThreadPoolExecutor(1))
        work = stream.submit(move)
        return SimpleNamespace(wait=lambda: work.result(timeout=20))

    def send(self, tensors: list[Tensor], other: int, _: int) -> Any:
        way = self._rank, other

        def move() -> None:
            self._pairs[way].put(tensors[0].clone())
            self._ends[way].acquire(timeout=10) or pytest.fail("nobody receives it")

        return self._after_others(other, move)

    def recv(self, tensors: list[Tensor], other: int, _: int) -> Any:
        way = other, self._rank

        def move() -> None:
            tensors[0].copy_(self._pairs[way].get(timeout=10))
            self._ends[way].release()

        return self._after_others(other, move)


@pytest.mark.parametrize("wants", [1, 24])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("after", [(), (0, 1, 2), (2, 0, 2, 1), (1, 0)], ids=str)  # states that a draft head reads
def test_stages_do_not_wait_for_each_other_for_ever_where_sends_are_in_order(
    count: int, wants: int, after: tuple[int, ...]
) -> None:
    """On a GPU each pair of ranks has one stream. gloo, which the other tests use, buffers."""
    ways = [(a, b) for a in range(count) for b in range(count) if a != b]
    pairs: dict[tuple[int, int], queue.Queue[Tensor]] = {way: queue.Queue() for way in ways}
    ends = {way: threading.Semaphore(0) for way in ways}
    runs = [Run([7] * 24, 0, [0, 1], 24, wants) for _ in range(4)]
    states_left: list[tuple[Tensor, Tensor]] = []
    result = Result(lambda states, batch: states[batch.wanted], lambda batch: len(batch.wanted), 3, torch.float32)

    def work(rank: int) -> Tensor:
        tensors = _InOrder(rank, pairs, ends)
        world = SimpleNamespace(rank=rank, count=count, tensors=tensors, wait=lambda work: work.wait())
        stages = ConnectedStages(cast(Any, world), rank, count)
        aux = StagedStates(
            after, count, stages, None, lambda slots, _, states: states_left.append((slots, states)), waits=False
        )

        def through(states: Tensor, batch: Batch, _: Any) -> Tensor:
            if aux.own is None:
                return states + 1
            aux.own.begin(states)
            aux.own.take(0, states)
            aux.own.finish(1, states + 1, batch.slots)
            return states + 1

        model = SimpleNamespace(
            dtype=torch.float32,
            device=torch.device("cpu"),
            embed=lambda tokens, _: tokens.float()[:, None].expand(-1, 3),
            through=through,
        )
        left = aux if after else None
        return pipelined(cast(Any, model), stages, equal_pieces(runs, 4), 16, cast(Any, None), 3, result, left)

    with ThreadPoolExecutor(count) as ranks:
        found = [work.result(timeout=30) for work in [ranks.submit(work, rank) for rank in range(count)]]
    assert torch.equal(found[0], torch.full((4 * wants, 3), 7.0 + count))
    if after:
        [(slots, states)] = states_left
        assert torch.equal(slots, Batch(runs, 16).slots)
        assert torch.equal(states, torch.tensor(after).repeat_interleave(3).add(7.0).expand(96, -1))


@pytest.mark.few(3)
@pytest.mark.parametrize(("tp", "pp"), [(1, 3), (2, 2)])
@pytest.mark.parametrize(
    "architecture",
    ["llama", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3_text"))],
)
@pytest.mark.parametrize("scheme", [None, "W4A16", "FP8_BLOCK", "NVFP4A16"])
def test_stages_of_ranks(tiny: Callable[..., Path], architecture: str, scheme: str | None, tp: int, pp: int) -> None:
    path = tiny(architecture)
    exact = logits_in_pieces(path, PROMPTS, STEPS)
    if scheme is not None:
        compressed(path, scheme, 32 if scheme == "W4A16" else None)
    for true, wanted, found in zip(exact, logits_in_pieces(path, PROMPTS, STEPS), piped(path, tp, pp), strict=True):
        if scheme == "FP8_BLOCK":  # of many rounded inputs, some are at the edge between two codes
            assert (found - true).norm() < 1.1 * (wanted - true).norm()
        else:
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_the_cpus_kernels_compute_stages(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", torch.bfloat16)
    operators = operators_for(torch.bfloat16, torch.device("cpu"), log=lambda _: None)
    wanted = logits_in_pieces(path, PROMPTS, STEPS, operators)
    exact = logits_in_pieces(tiny("llama"), PROMPTS, STEPS)
    for true, whole, parts in zip(exact, wanted, piped(path, 1, 2, operators), strict=True):
        assert (parts - true).norm() < 1.1 * (whole - true).norm()


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6),
    count=st.integers(1, 9),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pieces_have_equally_many_tokens_in_order(lengths: list[tuple[int, int]], count: int) -> None:
    runs = [
        Run(list(range(100 * i, 100 * i + tokens)), 7 * i, [i], 1000, min(wants, tokens))
        for i, (tokens, wants) in enumerate(lengths)
    ]
    pieces = equal_pieces(runs, count)
    sizes = [sum(len(run.tokens) for run in piece) for piece in pieces]
    assert len(pieces) == min(count, sum(sizes))
    assert max(sizes) - min(sizes) <= 1
    assert [token for piece in pieces for run in piece for token in run.tokens] == [
        t for run in runs for t in run.tokens
    ]
    for run in runs:
        parts = [part for piece in pieces for part in piece if part.blocks == run.blocks]
        assert [part.start for part in parts] == [
            run.start + sum(len(p.tokens) for p in parts[:i]) for i in range(len(parts))
        ]
        wanted = [token for part in parts for token in (part.tokens[-part.wants :] if part.wants else [])]
        assert wanted == (run.tokens[-run.wants :] if run.wants else [])
