"""Servers as processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENS = re.compile(r"serving .* at (http://\S+)")


@dataclass(frozen=True)
class Started:
    """A server that listens.

    Attributes:
        url: without a path.
        pid: of its process.
    """

    url: str
    pid: int

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        """Open files and sockets."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@contextlib.contextmanager
def smelt_server(checkpoint: str, *options: str) -> Iterator[Started]:
    """``smelt serve`` at a free port."""
    command = [
        sys.executable,
        "-m",
        "smelt.compress",
        "serve",
        checkpoint,
        "--port",
        "0",
        "--no-log-requests",
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = _LISTENS.search(line)
            if found:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield Started(found[1], process.pid)
                return
        raise SystemExit("the server has not started")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
