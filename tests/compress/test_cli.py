"""The command line as a user meets it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from smelt.compress.cli import app
from typer.testing import CliRunner

from ..tiny import REPOSITORY

QUICK = [
    part
    for field in (
        "calibrate.samples=8",
        "calibrate.length=32",
        "evaluate.windows=4",
        "evaluate.limit=40",
        "evaluate.speed=false",  # which tests of smelt eval measure
    )
    for part in ("--set", field)
]


def smelt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user starts it, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "smelt.compress.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )


def here(*arguments: str) -> Result:
    """The same in this process, which has imported everything."""
    with contextlib.chdir(REPOSITORY):
        return CliRunner().invoke(app, list(arguments))


def test_help_teaches_by_example() -> None:
    shown = here("--help")
    assert shown.exit_code == 0
    for example in ("smelt run recipes/quickstart.yaml", "--dry-run", "smelt inspect"):
        assert example in " ".join(shown.stdout.split())
    for command in ("run", "inspect", "schema"):
        assert here(command, "--help").exit_code == 0


def test_run_then_inspect(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = smelt("run", "recipes/quickstart.yaml", "--output", str(out), *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "quiet when not on a terminal"
    for word in ("perplexity", "KL", str(out / "checkpoint"), str(out / "report.html")):
        assert word in done.stdout
    text = (out / "report.md").read_text()
    assert text.startswith("# builtin:smelt-6m compressed by Smelt")
    assert "its weights are identical" in text
    assert "worst 20 of 42" in text
    shown = here("inspect", str(out / "checkpoint"))
    assert shown.exit_code == 0
    assert "int W4A16 g64" in shown.stdout
    data = json.loads(here("inspect", str(out / "checkpoint"), "--json").stdout)
    assert data["original_bytes"] == 11_538_432 or data["original_bytes"] > data["bytes"]
    assert data["ratio"] == pytest.approx(data["original_bytes"] / data["bytes"])
    # A finished run is reported again, for scripts as JSON.
    again = here("run", "recipes/quickstart.yaml", "--output", str(out), "--json", *QUICK)
    data = json.loads(again.stdout)
    assert data["report"]["models"][1]["text"]["perplexity"] > 0
    assert Path(data["checkpoint"]).is_dir()


def test_dry_run_plans_and_writes_nothing(tmp_path: Path) -> None:
    done = here("run", "recipes/quickstart.yaml", "--output", str(tmp_path / "out"), "--dry-run")
    assert done.exit_code == 0
    assert "no problems found" in done.stdout
    assert "loads:   vLLM" in done.stdout
    assert not (tmp_path / "out").exists()
    data = json.loads(
        here("run", "recipes/quickstart.yaml", "--dry-run", "--json", "--output", str(tmp_path / "out")).stdout
    )
    assert data["steps"][0]["linears"] == 42
    assert [loader["loads"] for loader in data["loaders"]] == [True, True, True]
    assert data["predicted"]["peak_memory_bytes"] > data["predicted"]["memory_above_start_bytes"] > 0
    assert data["predicted"]["served_memory_bytes"] > 1_400_000_000  # two processes with their libraries


def test_dry_run_lists_every_problem_and_fails(tmp_path: Path) -> None:
    bad = ["--set", "steps.0.quantize.group_size=100", "--set", "calibrate.source=missing.txt"]
    done = here("run", "recipes/quickstart.yaml", "--output", str(tmp_path / "out"), "--dry-run", *bad)
    assert done.exit_code == 1
    assert "group_size 100" in done.stdout
    assert "missing.txt" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (("run", "nowhere.yaml"), 1, "smelt: nowhere.yaml: recipe file not found; check the path\n"),
        (("inspect", "nowhere/at/all"), 1, "smelt: model nowhere/at/all: directory not found"),
        (("run",), 2, "Missing argument"),
        (("rum", "x"), 2, "Did you mean 'run'"),
    ],
)
def test_mistakes_are_one_sentence_and_a_status(arguments: tuple[str, ...], status: int, expected: str) -> None:
    done = here(*arguments)
    assert done.exit_code == status
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_schema_is_json() -> None:
    assert json.loads(here("schema").stdout)["title"] == "Smelt recipe"
