"""Starting ranks: processes of our own, or those that torchrun has started."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] - documented there
from torch.distributed.distributed_c10d import Store

from ...system.errors import RuntimeProblem
from ...system.processes.child_processes import OtherProcesses
from ...system.processes.process_group import meeting_place
from .ranks import ConnectedRanks

_START_SECONDS = 300.0


def launched_count() -> int:
    """How many processes a launcher such as torchrun has started together; 1 for none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This one's number among them."""
    return int(os.environ.get("RANK", "0"))


def joined_by_environment(device: str) -> ConnectedRanks:
    """This process as one of those that a launcher such as torchrun has started.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    return ConnectedRanks(meeting_place(), launched_rank(), launched_count(), device)


def joined_at(place: Path, rank: int, count: int, device: str) -> ConnectedRanks:
    """This process as one of those that :func:`started` has started.

    Args:
        place: the file where they meet.
        rank: its number.
        count: how many there are.
        device: ``cpu`` or ``cuda``.
    """
    store = FileStore(str(place), count)
    store.set(_here(rank), "")
    return ConnectedRanks(store, rank, count, device, here_only=True)


def started(module: str, count: int, device: str) -> tuple[ConnectedRanks, OtherProcesses]:
    """Start the other ranks on this machine; this process is the first. Nobody else can connect to them.

    Args:
        module: what they run, with this process' number, the file where they meet, a rank, the count and the device; it
            calls :func:`.ends_with` and :func:`joined_at`.
        count: how many ranks there are.
        device: ``cpu`` or ``cuda``.

    Raises:
        RuntimeProblem: one of them has ended before it was ready.
    """
    directory = tempfile.TemporaryDirectory(prefix="smelt-ranks-")
    place = Path(directory.name) / "store"
    store = FileStore(str(place), count)
    others = OtherProcesses.started(
        count,
        lambda rank: [sys.executable, "-m", module, str(os.getpid()), str(place), str(rank), str(count), device],
        lambda rank: {"LOCAL_RANK": str(rank)},
        directory,
    )
    try:
        _wait_for_all(store, count, others)
        return ConnectedRanks(store, 0, count, device, here_only=True, others=others.lost), others
    except BaseException:
        others.end(0)
        raise


def _here(rank: int) -> str:
    return f"smelt: rank {rank} is here"


def _wait_for_all(store: Store, count: int, others: OtherProcesses) -> None:
    """Wait until all ranks are about to connect: connecting waits for those that never come."""
    until = time.monotonic() + _START_SECONDS
    missing = list(range(1, count))
    while missing:
        lost = others.lost()
        if lost is not None:
            raise RuntimeProblem(f"{lost} before it was ready; what it printed says why")
        if time.monotonic() > until:
            raise RuntimeProblem(f"rank {missing[0]} has not started within {_START_SECONDS:g} seconds")
        missing = [rank for rank in missing if not store.check([_here(rank)])]
        time.sleep(0.02)
