"""How a command ends when a signal comes, in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What a command does when another process of its run is gone, and what its launcher then does to it.
FAILS_AND_IS_TERMINATED = """
import os, signal
import typer
from smelt.system.errors import SmeltError
from smelt.system.interrupts import end_when_interrupted
end_when_interrupted(continues=True)
from smelt.compress.commands.common.outcome import reporting_errors

def fail():
    raise SmeltError("another process is gone")

try:
    {command}
except typer.Exit:
    pass
os.kill(os.getpid(), signal.{signal})
"""


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("reporting_errors(fail)()", "smelt: another process is gone"),
        ("pass", "smelt: interrupted; the same command continues where this one stopped"),
    ],
)
def test_one_sentence_says_why_a_process_ends(signal: str, command: str, says: str) -> None:
    script = FAILS_AND_IS_TERMINATED.format(signal=signal, command=command)
    # A shell's background jobs ignore SIGINT, and so would a process of theirs.
    with_sigint = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + script
    status = 143 if signal == "SIGTERM" else 130
    ended = subprocess.run([sys.executable, "-c", with_sigint], capture_output=True, text=True, check=False)
    assert (ended.stderr.splitlines(), ended.returncode) == ([says], status)


def test_a_command_that_starts_over_would_do_so_again() -> None:
    script = "import os, signal\nfrom smelt.system.interrupts import end_when_interrupted\n"
    script += "end_when_interrupted(continues=True, fresh=True)\nos.kill(os.getpid(), signal.SIGTERM)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (
        ended.stderr.strip() == "smelt: interrupted; the same command without --fresh continues where this one stopped"
    )
