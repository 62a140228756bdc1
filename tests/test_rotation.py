"""The share of slow tests that continuous integration has time for is another one each day."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from .rotation import rotated
from .tiny import REPOSITORY


@dataclass(frozen=True)
class _Test:
    nodeid: str


TESTS = [_Test(f"test_{file}.py::test_{number}") for file in range(30) for number in range(1 + file % 13)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_all_come_first_within_a_few_runs(share: float, workers: int) -> None:
    """Each worker begins at another part of the order."""
    for day in (0, 20_650):
        seen = set[_Test]()
        for number in range(day, day + int(2.7 / share)):
            order = rotated(TESTS, number)
            part = len(order) / workers
            for worker in range(workers):
                seen |= set(order[int(worker * part) : int((worker + share) * part) + 1])
        assert seen == set(TESTS)


def test_those_of_a_file_stay_together_and_in_order() -> None:
    order = rotated(TESTS, 5)
    assert order == rotated(TESTS, 5)
    assert sorted(order, key=TESTS.index) == TESTS
    files = [(file, list(tests)) for file, tests in groupby(order, lambda test: test.nodeid.partition("::")[0])]
    assert len({file for file, _ in files}) >= len(files) - 1  # the first may be continued at the end
    for _, tests in files:
        assert tests == sorted(tests, key=TESTS.index)


def test_none_begins_after_the_last_minute(tmp_path: Path) -> None:
    # The first makes an hour go by.
    (tmp_path / "test_a.py").write_text(
        "from tests import rotation\ndef test_one(): rotation._begun -= 3600\ndef test_two(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.rotation", "--rootdir", tmp_path]
    done = subprocess.run(
        [*command, "-c", "/dev/null", "-rs", "--minutes=30", "--rotate=0", tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    assert "the 30 minutes are over" in done.stdout
    assert "--rotate 0: 1 tests left for other runs" in done.stdout


@pytest.mark.slow
def test_the_makefile_names_it() -> None:
    if not (REPOSITORY / ".venv/bin/python").exists():
        pytest.skip("make uses .venv, which is not here")
    make = ["make", "--no-print-directory", "--dry-run", "test-slow", "MINUTES=7"]
    shown = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    (command,) = (line for line in shown.stdout.replace("\\\n", " ").splitlines() if "-m pytest" in line)
    words = [word for word in shlex.split(command) if not word.startswith("OMP_")]
    assert "--minutes=7" in words
    done = subprocess.run(
        [*words, "--collect-only", "-n", "0", "tests/test_layout.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, done.stdout + done.stderr  # that file has no slow test
