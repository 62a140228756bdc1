"""Sums through memory that ranks share."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime.native.library import kernels as compiled_kernels
from smelt.runtime.parallel.ranks import ConnectedRanks, RankLost
from smelt.runtime.parallel.shared_memory import Others, SharedMemory
from torch import Tensor
from torch.distributed import HashStore

from .thread_ranks import CountingRanks, on_ranks

SIZES = [1, 7, 2048, 1025 * 1023]  # the last one is longer than a part


@pytest.fixture(scope="module")
def kernels() -> Any:
    found = compiled_kernels(lambda _: None)
    if found is None:
        pytest.skip("Smelt's compiled CPU kernels are not available here")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 5])
def test_all_have_the_same_sum_which_is_that_of_float64(count: int, dtype: torch.dtype, kernels: Any) -> None:
    draw = torch.Generator().manual_seed(count)
    parts = [[torch.randn(size, generator=draw).to(dtype) for size in SIZES] for _ in range(count)]

    def work(ranks: CountingRanks) -> list[Tensor]:
        memory = SharedMemory.of(ranks, kernels)
        assert memory is not None
        mine = [part.clone() for part in parts[ranks.rank]]
        for part in mine:
            memory.all_reduce(part, lambda: None)
        return mine

    found = on_ranks(count, work)
    for size, *of_ranks in zip(range(len(SIZES)), *found, strict=True):
        wanted = torch.stack([parts[rank][size].double() for rank in range(count)]).sum(0)
        for one in of_ranks:
            assert torch.equal(one, of_ranks[0])
            # Rounded once, from sums in float32.
            error = (one.double() - wanted).abs() / torch.stack(
                [parts[r][size].double().abs() for r in range(count)]
            ).sum(0)
            assert error.max() <= (2**-8 if dtype == torch.bfloat16 else count * 2**-24)


def test_no_part_is_overwritten_before_all_have_read_it(kernels: Any) -> None:
    turns, count = 400, 3

    def work(ranks: CountingRanks) -> list[float]:
        memory = SharedMemory.of(ranks, kernels)
        assert memory is not None
        draw, found = random.Random(ranks.rank), []
        for turn in range(turns):
            if draw.random() < 0.05:
                time.sleep(0.002)
            part = torch.full((300,), float(turn * count + ranks.rank))
            memory.all_reduce(part, lambda: None)
            assert bool((part == part[0]).all())
            found.append(float(part[0]))
        return found

    wanted = [float(sum(turn * count + rank for rank in range(count))) for turn in range(turns)]
    assert on_ranks(count, work) == [wanted] * count


@pytest.mark.parametrize("lacking", [0, 1])
def test_without_kernels_on_one_rank_none_shares_memory(
    lacking: int, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    file_of = SharedMemory.file_of

    def recorded(*given: Any) -> Path:
        made.append(file_of(*given))
        return made[-1]

    monkeypatch.setattr(SharedMemory, "file_of", staticmethod(recorded))

    def work(ranks: CountingRanks, lacks: int | None) -> bool:
        return SharedMemory.of(ranks, None if ranks.rank == lacks else kernels) is None

    assert all(on_ranks(2, lambda ranks: work(ranks, lacking)))
    assert not any(on_ranks(2, lambda ranks: work(ranks, None)))
    assert len(made) == 1
    assert not made[0].exists()


def test_a_full_disk_leaves_nothing_and_shares_nothing(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("smelt.runtime.parallel.shared_memory._PLACE", str(tmp_path))
    monkeypatch.setattr("os.posix_fallocate", full)
    assert on_ranks(2, lambda ranks: SharedMemory.of(ranks, kernels)) == [None, None]
    assert not list(tmp_path.iterdir())


def waiting(kernels: Any, then: Callable[[ConnectedRanks], None], seconds: float | None) -> tuple[str, float]:
    """What the first rank says that waits for a second one that does not come, and after how long."""
    store, said = HashStore(), list[str]()
    ready = threading.Barrier(2)
    spent = [0.0]

    def first() -> None:
        ranks = connected[0]
        if seconds is not None:
            ranks.limit(seconds)
        begun = time.monotonic()
        with pytest.raises(RankLost) as error:
            ranks.all_reduce(torch.ones(3))
        spent[0] = time.monotonic() - begun
        said.append(str(error.value))

    connected: dict[int, ConnectedRanks] = {}

    def connect(rank: int) -> None:
        connected[rank] = ranks = ConnectedRanks(store, rank, 2, "cpu", here_only=True)
        ranks.share_memory(kernels)
        ready.wait()
        if rank == 0:
            first()

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join()
    time.sleep(0.3)
    then(connected[0])
    threads[0].join(20)
    for ranks in connected.values():
        ranks.close()
    return said[0], spent[0]


def test_a_rank_that_waits_hears_that_connections_end(kernels: Any) -> None:
    said, spent = waiting(kernels, lambda ranks: ranks.close(), None)
    assert "another rank has ended" in said
    assert spent < 10


def test_a_rank_waits_no_longer_than_its_limit(kernels: Any) -> None:
    said, spent = waiting(kernels, lambda _: None, 0.4)
    assert "has not answered within 0.4 seconds" in said
    assert 0.4 <= spent < 10


def test_processes_that_have_ended_are_known_even_before_their_parent_asks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    others = Others([child.pid])
    assert others.ended() is None
    child.kill()
    until = time.monotonic() + 10
    while others.ended() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert others.ended() == 0
    child.wait()
    assert others.ended() == 0
