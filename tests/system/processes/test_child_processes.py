"""Processes that are watched: whoever waits for one that was killed must hear of it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from smelt.system.processes.child_processes import OtherProcesses


def _sleeping(count: int = 2) -> OtherProcesses:
    code = "import sys; sys.exit(int(sys.stdin.readline() or 0))"
    return OtherProcesses([subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(count)])


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_lost_process_is_reported(how: str) -> None:
    others, called = _sleeping(), threading.Event()
    others.watch(called.set)
    process = others._processes[1]
    if how == "killed":
        process.kill()
    else:
        process.communicate(b"3\n")
    assert called.wait(10)
    assert "rank 2" in str(others.lost())
    others.end(0)


def test_processes_that_end_as_they_should_are_not_lost() -> None:
    others, called = _sleeping(), threading.Event()
    others.watch(called.set)
    others._processes[0].communicate(b"0\n")
    assert not called.wait(2.5)
    others.end(0)
    assert not called.wait(1.5)
