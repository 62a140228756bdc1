"""Progress where standard error is a file: nothing of short work, and of long work a line now and then."""

from __future__ import annotations

import pytest
from smelt.system import progress
from smelt.system.progress import Progress


def test_long_work_is_logged_with_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in Progress().track(range(10), "quantizing"):
        now[0] += 12
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "smelt: quantizing: 3 of 10, about 1 min left",
        "smelt: quantizing: 6 of 10, about 1 min left",
        "smelt: quantizing: 9 of 10, about 0 min left",
    ]


def test_short_and_silent_work_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(Progress().track([1, 2], "short")) == [1, 2]
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in Progress(False).track(range(3), "silent"):
        now[0] += 100
    assert capsys.readouterr().err == ""
