"""How the processes that a launcher has started share a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...system.processes import Processes
from ..training.sharded import Sharding, SpreadOver
from .arrangement import Arrangement


def shards(processes: Processes) -> int:
    """Over how many processes the weights that they train together are sharded."""
    return 1 if processes.count == 1 else processes.count // Arrangement.of_launcher(processes.count).replicas


@contextmanager
def sharded(processes: Processes) -> Iterator[Sharding]:
    """How a training that begins now is sharded over the processes; its collectives work within."""
    if processes.count == 1:
        yield Sharding()
        return
    arranged = Arrangement.of_launcher(processes.count)
    with processes.default_group():
        yield SpreadOver(processes.device, arranged.replicas, reshard=arranged.reshard)
