"""How the processes started by a launcher share a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...system.processes.process_group import Processes
from ..training.sharded import Sharding, SpreadOver
from .arrangement import Arrangement


def shards(processes: Processes) -> int:
    """The number of processes over which trained weights are sharded."""
    return 1 if processes.count == 1 else processes.count // Arrangement.of_launcher(processes.count).replicas


@contextmanager
def sharded(processes: Processes) -> Iterator[Sharding]:
    """The sharding of a training that starts now; its collectives work within this context."""
    if processes.count == 1:
        yield Sharding()
        return
    arranged = Arrangement.of_launcher(processes.count)
    with processes.default_group():
        yield SpreadOver(processes.device, arranged.replicas, reshard=arranged.reshard)
