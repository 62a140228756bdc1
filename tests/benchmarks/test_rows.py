"""Rows of a results file: what was measured is kept with its day, and not measured again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.common import ResultRows


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


def test_an_interrupted_script_goes_on(results: Path) -> None:
    rows = ResultRows("losses", "python -m benchmarks.losses")
    assert not rows.has(method="gptq", seed=0)
    rows.add({"method": "gptq", "seed": 0, "kl": 0.5})
    again = ResultRows("losses", "python -m benchmarks.losses")
    assert again.has(method="gptq", seed=0)
    assert not again.has(method="gptq", seed=1)
    again.add({"method": "gptq", "seed": 1, "kl": 0.25})
    file = json.loads((results / "losses.json").read_text())
    assert file["command"] == "python -m benchmarks.losses"
    assert [row["kl"] for row in file["results"]] == [0.5, 0.25]


def test_rows_keep_their_day(results: Path) -> None:
    old = {"command": "", "date": "2001-02-03", "results": [{"method": "a"}, {"method": "b", "date": "2002-03-04"}]}
    (results / "losses.json").write_text(json.dumps(old))
    rows = ResultRows("losses", "")
    rows.add({"method": "c"})
    found = json.loads((results / "losses.json").read_text())
    assert [row["date"] for row in found["results"]] == ["2001-02-03", "2002-03-04", found["date"]]


def test_parts_of_a_file_stay(results: Path) -> None:
    ResultRows("peers", "", "quality").add({"tool": "smelt"})
    cost = ResultRows("peers", "", "cost")
    assert list(cost) == []
    cost.add({"tool": "other"})
    found = json.loads((results / "peers.json").read_text())["results"]
    assert {part: [row["tool"] for row in rows] for part, rows in found.items()} == {
        "quality": ["smelt"],
        "cost": ["other"],
    }
