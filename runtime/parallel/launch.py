"""Starting ranks: processes of our own, or those that torchrun has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] - documented there
from torch.distributed.distributed_c10d import Store

from ...system.errors import RuntimeProblem
from ...system.processes import meeting_place
from .ranks import ConnectedRanks

_START_SECONDS = 300.0
_END_SECONDS = 10.0


def launched_count() -> int:
    """How many processes a launcher such as torchrun has started together; 1 for none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This one's number among them."""
    return int(os.environ.get("RANK", "0"))


class OtherProcesses:
    """Processes that this one has started.

    Args:
        processes: they, from rank 1 on; none if a launcher has started them.
        directory: where they meet; removed at the end.
    """

    def __init__(
        self, processes: list[subprocess.Popen[bytes]], directory: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self._processes, self._directory = processes, directory

    def lost(self, seconds: float = 0.0) -> str | None:
        """Which one has ended, and how; None if all run.

        Args:
            seconds: to wait for it: a process' connections close a moment before it has ended.
        """
        until = time.monotonic() + seconds
        while (found := self._ended()) is None and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def _ended(self) -> str | None:
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
                return f"rank {rank} (process {process.pid}) {how}"
        return None

    def end(self, seconds: float = _END_SECONDS) -> None:
        """Wait so long for them to end by themselves, and then end them."""
        until = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._directory is not None:
            self._directory.cleanup()


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
            calls :func:`ends_with` and :func:`joined_at`.
        count: how many ranks there are.
        device: ``cpu`` or ``cuda``.

    Raises:
        RuntimeProblem: one of them has ended before it was ready.
    """
    directory = tempfile.TemporaryDirectory(prefix="smelt-ranks-")
    place = Path(directory.name) / "store"
    store = FileStore(str(place), count)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), str(place), str(rank), str(count), device],
            env=os.environ | {"LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # In a session of their own: an interrupt is for this process, which then ends them.
            start_new_session=True,
        )
        for rank in range(1, count)
    ]
    others = OtherProcesses(processes, directory)
    try:
        _wait_for_all(store, count, others)
        return ConnectedRanks(store, 0, count, device, here_only=True), others
    except BaseException:
        others.end(0)
        raise


def ends_with(parent: int) -> None:
    """End this process as soon as the one that has started it is gone, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
