"""Ranks as threads of one process: they talk through gloo as processes do, and start at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
from smelt.runtime.parallel import ranks as ranks_module
from smelt.runtime.parallel.ranks import ConnectedRanks
from torch import Tensor
from torch.distributed import HashStore

T = TypeVar("T")
# If one fails, the others wait no longer.
_PATIENCE = timedelta(minutes=2)


class CountingRanks(ConnectedRanks):
    """Counts what the model asks of the others.

    Attributes:
        counts: collectives by name.
    """

    counts: Counter[str]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts["all_reduce"] += 1
        return super().all_reduce(tensor)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        self.counts["all_gather"] += 1
        return super().all_gather(tensor, sizes, dim)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.counts["all_to_all"] += 1
        return super().all_to_all(tensor, sent, received)


def on_ranks(count: int, work: Callable[[CountingRanks], T]) -> list[T]:
    """What each rank returns, by rank."""
    store = HashStore()
    together = threading.Barrier(count)
    all_ranks: list[CountingRanks] = []

    def run(rank: int) -> T:
        together.wait()
        ranks = CountingRanks(store, rank, count, "cpu")
        ranks.counts = Counter()
        all_ranks.append(ranks)
        try:
            found = work(ranks)
        except BaseException:
            for each in all_ranks:  # the others would wait for this one
                each.close()
            raise
        ranks.close()
        return found

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        patch.setattr(ranks_module, "_PATIENCE", _PATIENCE)
        return list(pool.map(run, range(count)))
