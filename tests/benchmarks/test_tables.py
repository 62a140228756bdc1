"""The tables of README and docs: what the results files say, and nothing else."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.common import RESULTS
from benchmarks.tables import documents
from benchmarks.tables.table import spread

from ..tiny import REPOSITORY


@pytest.mark.parametrize("name", documents.PLACES)
def test_documents_say_what_was_measured(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    assert documents.filled(text) == text, f"{name}: run python -m benchmarks.tables"


def test_every_table_is_in_a_document() -> None:
    everything = "".join((REPOSITORY / name).read_text() for name in documents.PLACES)
    assert [name for name in documents.TABLES if f"<!-- results: {name} -->\n" not in everything] == []


def test_a_table_follows_its_file(tmp_path: Path) -> None:
    known = json.loads((RESULTS / "against_peers.json").read_text())
    known["results"]["quality"][0]["date"] = "2001-02-03"
    for row in known["results"]["quality"]:
        if (row["tool"], row["method"], row["bits"]) == ("smelt", "gptq", 3):
            row |= {"perplexity": (5.0, 6.0, 10.0)[row["seed"]], "kl": 0.25}
    (tmp_path / "against_peers.json").write_text(json.dumps(known))
    document = "before\n<!-- results: peers -->\nold\n<!-- results end -->\nafter\n"
    found = documents.filled(document, tmp_path)
    assert "| Smelt: gptq | 7.0 ± 2.6, 0.2500 |" in found  # the deviation of 5, 6 and 10 is the root of 7
    assert known["command"] in found
    # Rows of several days, as a script that goes on keeps them.
    last = max(row["date"] for rows in known["results"].values() for row in rows if "date" in row)
    assert f"2 cores of an AMD EPYC, 2001-02-03 to {last}" in found
    assert "old" not in found
    assert found.startswith("before\n")
    assert found.endswith("after\n")
    assert documents.filled(found, tmp_path) == found


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    assert documents.text_of("blimp", tmp_path) == "Not measured: there is no `benchmarks/results/blimp.json`.\n"


def test_a_spread_is_the_standard_deviation_over_seeds() -> None:
    values = [81.2, 84.9, 80.1]
    assert spread(values, 3) == f"{sum(values) / 3:.3f} ± {statistics.stdev(values):.3f}"
    assert spread([2.0, 2.0], 1) == "2.0"  # seeds that change nothing have no spread to show
