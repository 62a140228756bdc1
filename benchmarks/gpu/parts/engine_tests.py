"""The engine's own tests that compute on a GPU: drafts, seeds, beams, scoring, a starved cache; each a job.

They take tiny models in float32, whose tokens are compared with transformers' and with those of a CPU. Most of their time goes
into compiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ..job import Job, Row
from ..place import Place

if TYPE_CHECKING:
    import pytest

IMPORTS = ("pytest", "transformers", "compressed_tensors", "pydantic", "loguru", "psutil", "scipy", "smelt.compress")
WORKERS = 8
_FILES = (
    "tests/runtime/gpu/test_drafts.py",
    "tests/gpu/test_drafts.py",
    "tests/gpu/test_same_tests.py",
    "tests/gpu/test_gpu.py",
    "tests/gpu/test_calibration.py",
)
# Small cases are a part of their own, which has come before.
_REPEATS = "tests/gpu/test_gpu.py::test_a_case_agrees"
_OPTIONS = ("-q", "-p", "no:cacheprovider", "-m", "slow or not slow", f"--deselect={_REPEATS}")


def jobs(place: Place) -> list[Job]:
    """One each; a rehearsal tries the first."""
    import pytest

    seen = _Seen()
    status = pytest.main([*_OPTIONS, "--collect-only", *_FILES], plugins=[seen])
    if status:
        raise RuntimeError(f"pytest could not collect {' and '.join(_FILES)}: {status!r}")
    found = seen.names[:1] if place.rehearses else seen.names[::10] if place.quick else seen.names
    return [Job(name, partial(_tested, name), limit_s=150) for name in found]


def _tested(name: str, place: Place) -> Iterator[Row]:
    import pytest

    seen = _Seen()
    status = pytest.main([*_OPTIONS, name], plugins=[seen])
    problem = None if not status else seen.failures[-1] if seen.failures else f"pytest ended with {status!r}"
    yield {"outcome": seen.outcomes[-1] if seen.outcomes else "none", "problem": problem}


class _Seen:
    """What pytest reports: names of tests, how they ended, and the last line of what went wrong."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.outcomes: list[str] = []
        self.failures: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.append(report.outcome)
        if report.outcome == "failed":
            self.failures.append((report.longreprtext.strip().splitlines() or ["failed"])[-1][:300])
