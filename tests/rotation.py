"""Hooks for a share of the tests that no run has time for: others come first each time, and none begins too late.

``--rotate NUMBER`` sorts files by a digest of their names and begins elsewhere for each number; ``--minutes N`` skips
what has not begun by then. With a number that grows by one from run to run, all tests come first in turn.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

_GOLDEN = (5**0.5 - 1) / 2
_begun = time.monotonic()
_Named = TypeVar("_Named", bound=Any)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    parser.addoption("--minutes", type=float, help="skip tests that have not begun after so many minutes")
    parser.addoption("--rotate", type=int, help="begin elsewhere among the tests for each number")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the order of the number."""
    number = config.getoption("--rotate")
    if number is not None:
        items[:] = rotated(items, number)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins too late."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - _begun > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes are over; runs with other numbers begin elsewhere")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How to get the same order again."""
    if config.getoption("--rotate") is not None:
        left = sum("minutes are over" in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
        terminalreporter.write_line(f"--rotate {config.getoption('--rotate')}: {left} tests left for other runs")


def rotated(items: Sequence[_Named], number: int) -> list[_Named]:
    """Tests in the order of a number.

    Args:
        items: with a ``nodeid``; those of a file stay together, in their order.
        number: steps of a golden section lead to where it begins, so that the beginnings of several runs in a row lie
            far apart, however many tests each has time for.
    """

    def place(item: Any) -> bytes:
        return hashlib.sha256(item.nodeid.partition("::")[0].encode()).digest()

    ordered = sorted(items, key=place)
    first = int(number * _GOLDEN % 1 * len(ordered))
    return ordered[first:] + ordered[:first]
