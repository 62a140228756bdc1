"""``smelt serve`` as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started(*options: str, ends_gently: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on smelt-6m, once it listens, and its address.

    Args:
        options: of the command.
        ends_gently: whether it may end its own processes afterwards; otherwise it is killed.
    """
    command = [sys.executable, "-m", "smelt.compress", "serve", "builtin:smelt-6m", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"serving .* at (http://\S+)", line)
            if found:
                # So that it never waits for a reader.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield process, found[1]
                return
        raise AssertionError("".join(lines))
    finally:
        process.send_signal(signal.SIGTERM if ends_gently else signal.SIGKILL)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
