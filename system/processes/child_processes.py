"""Processes that this one starts beside it, and that end with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

_END_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_GONE_SECONDS = 0.2


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
        self._ending = threading.Event()

    @classmethod
    def started(
        cls,
        count: int,
        command: Callable[[int], list[str]],
        environment: Callable[[int], dict[str, str]],
        directory: tempfile.TemporaryDirectory[str] | None = None,
    ) -> Self:
        """Start all but the first of several processes; they call :func:`ends_with`.

        Args:
            count: how many they are, this one included.
            command: of each rank.
            environment: of each, beside this one's.
            directory: where they meet, if it is to be removed at the end.
        """
        processes = [
            subprocess.Popen(
                command(rank),
                env=os.environ | environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # In a session of their own: an interrupt is for this process, which then ends them.
                start_new_session=True,
            )
            for rank in range(1, count)
        ]
        return cls(processes, directory)

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

    def watch(self, when_lost: Callable[[], object]) -> None:
        """Call a function, from a thread, if one of them fails or is killed before :meth:`end` is called.

        Args:
            when_lost: the function.
        """

        def look() -> None:
            while not self._ending.wait(_LOOK_SECONDS):
                if any(process.poll() not in (None, 0) for process in self._processes):
                    when_lost()
                    return

        if self._processes:
            threading.Thread(target=look, name="smelt-watch", daemon=True).start()

    def end(self, seconds: float = _END_SECONDS) -> None:
        """Wait so long for them to end by themselves, and then end them."""
        self._ending.set()
        until = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._directory is not None:
            self._directory.cleanup()


def is_left(parent: int, seconds: float = _GONE_SECONDS) -> bool:
    """Whether the process that has started this one is gone, or goes within some time: its connections close a moment before it has ended."""
    until = time.monotonic() + seconds
    while os.getppid() == parent:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def ends_with(parent: int, directory: Path | None = None) -> None:
    """End this process as soon as the one that has started it is gone, however that ended.

    Args:
        parent: that has started it.
        directory: that it would have removed.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
