"""A command on several processes of this machine, of which this one is the first."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ....system.errors import SmeltError
from ....system.processes.child_processes import OtherProcesses, ends_with

_PARENT = "SMELT_PARENT"
_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS, _NOTICE_SECONDS = 0.5, 5.0


@contextmanager
def on_processes(count: int) -> Iterator[None]:
    """Within it this process is the first of several that run the same command, as if torchrun had started them.

    Args:
        count: how many there are; with one, nothing is started.

    Raises:
        SmeltError: a launcher has started several already.
    """
    parent = os.environ.get(_PARENT)
    if parent is not None:
        ends_with(int(parent))
        yield
        return
    if count == 1:
        yield
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SmeltError("--processes starts processes, but a launcher has started this one; use one of them")
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    together = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": threads,
    }
    # Read by torch, which is not imported yet.
    os.environ.update(together | {"RANK": "0", "LOCAL_RANK": "0"})
    command = [sys.executable, "-m", "smelt.compress", *sys.argv[1:]]
    others = OtherProcesses.started(
        count, lambda _: command, lambda rank: {"RANK": str(rank), "LOCAL_RANK": str(rank), _PARENT: str(os.getpid())}
    )
    ended = threading.Event()
    threading.Thread(target=_watch, args=(others, ended), daemon=True).start()
    try:
        yield
    except BaseException:
        ended.set()
        others.end(0)
        raise
    ended.set()
    others.end()


def _watch(others: OtherProcesses, ended: threading.Event) -> None:
    """End this process if another has ended too early, and it does not notice by itself: it may wait for the other for days."""
    while not ended.wait(_LOOK_SECONDS):
        lost = others.lost()
        if lost is None or lost.endswith("exit code 0"):
            continue
        if ended.wait(_NOTICE_SECONDS):
            return
        print(
            f"smelt: {lost}, and this run needs it; the same command continues where this one stopped", file=sys.stderr
        )
        others.end(0)
        os._exit(1)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_LOOPBACK, 0))
        return found.getsockname()[1]
