"""Two runtimes in turns: each run has the other's beside it in time, and the rate at which memory was read just then.

A machine that is shared reads its memory at 42 GB/s now and at 68 a minute later, so that two medians taken one after
another compare two machines. Here both have loaded their model, and one line asks one of them for one run.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

READY, SECONDS = "ready", "seconds"


def answer(runs: Mapping[str, Callable[[int], float]]) -> None:
    """Run what standard input asks for, such as ``prefill 512``, and say how many seconds it took, until it ends."""
    print(READY, flush=True)
    for line in sys.stdin:
        name, size = line.split()
        print(SECONDS, runs[name](int(size)), flush=True)


class Runtime:
    """A process that has loaded a model and waits to be asked for a run.

    Args:
        command: what to start; it calls :func:`answer`.
        directory: where to start it.
    """

    def __init__(self, command: list[str], directory: Path) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the process's; a pipe that nobody reads would stop it
        self._process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        self._line(READY)

    def seconds(self, name: str, size: int) -> float:
        """How long one run took."""
        assert self._process.stdin
        self._process.stdin.write(f"{name} {size}\n")
        self._process.stdin.flush()
        return float(self._line(SECONDS).split()[1])

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.communicate()  # its input ends, and so does it

    def _line(self, first: str) -> str:
        """The next line that begins so; a library may have printed others."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.split()[:1] == [first]:
                return line
        self._end()
        self._said.seek(0)
        raise RuntimeError((self._said.read().strip().splitlines() or ["it ended without a word"])[-1][:300])


def in_turns(
    ours: Runtime,
    theirs: Runtime,
    runs: Mapping[str, tuple[str, int, int]],
    rounds: int,
    read_rate: Callable[[], float],
) -> dict[str, Any]:
    """Measure both, round by round, the one that begins changing each time.

    Args:
        ours, theirs: the two.
        runs: for each result, the run, its size, and the tokens that it is to be divided by.
        rounds: how many of each, after one to warm up.
        read_rate: bytes a second that the machine reads now.

    Returns:
        For each result tokens a second of both, the median of the rounds' ratios ``ours / theirs`` and all of them, and
        the bytes a second that were read before each round.
    """
    found: dict[str, Any] = {}
    for result, (name, size, tokens) in runs.items():
        for runtime in (ours, theirs):
            runtime.seconds(name, size)
        rates: dict[Runtime, list[float]] = {ours: [], theirs: []}
        read = []
        for number in range(rounds):
            read.append(read_rate())
            for runtime in (ours, theirs) if number % 2 else (theirs, ours):
                rates[runtime].append(tokens / runtime.seconds(name, size))
        ratios = [mine / other for mine, other in zip(rates[ours], rates[theirs], strict=True)]
        found[result] = {
            "ours": statistics.median(rates[ours]),
            "theirs": statistics.median(rates[theirs]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "read": read,
        }
    return found
