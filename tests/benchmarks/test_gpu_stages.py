"""What a GPU is asked, without one: jobs that kill their process, stages that are cut and gone on with, and a rehearsal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import goals
from benchmarks.gpu.pool import PartRunner, PoolSettings
from benchmarks.gpu.results import Entry, Results, source_hash
from benchmarks.gpu.stage import STAGES
from benchmarks.gpu.wheels import unlisted
from benchmarks.tables import documents

from ..tiny import REPOSITORY

PART = "tests.benchmarks.jobs_that_fail"
FACTS = {"device": "a device"}


def _run(folder: Path, facts: dict[str, Any] = FACTS, seconds: float = 300) -> tuple[Any, Results]:
    """The part's jobs, in workers that rehearse."""
    made: list[Results] = []

    def open_results(_: dict[str, Any]) -> Results:
        made.append(Results(folder, "test", facts, {"command": "a test", "commit": ""}, lambda _: None))
        return made[0]

    settings = PoolSettings(folder / "log", ("--rehearse", "--scratch", str(folder)))
    outcome = PartRunner(PART, settings, time.monotonic() + seconds).run(open_results)
    return outcome, made[0]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.slow
def test_whatever_a_job_does_to_its_process_others_are_done_and_rows_are_kept(tmp_path: Path) -> None:
    outcome, results = _run(tmp_path)
    assert (outcome.reached, outcome.of, outcome.lacking) == (7, 7, "")
    states = {entry.key: (entry.state, entry.rows) for entry in results.entries.values()}
    assert states == {
        "works": ("done", [{"value": 1}, {"value": 2}]),
        "raises": ("failed", [{"value": 3}]),
        "dies": ("failed", [{"value": 4}]),
        "hangs": ("failed", []),
        "finds something wrong": ("done", [{"problem": "outputs are wrong"}]),
        "stops the device": ("failed", [{"value": 5}]),
        "works, too": ("done", [{"value": 1}, {"value": 2}]),
    }
    why = {entry.key: entry.why for entry in results.entries.values() if entry.why}
    assert why["raises"] == "ValueError: an illegal"
    assert "SIGKILL" in why["dies"]
    assert why["hangs"] == "it took more than 1 s, and was stopped"
    assert "the device had stopped" in why["stops the device"]
    # The whole of it is in the log.
    assert "memory access" in (tmp_path / "log").read_text()

    # What the file says is what is known; another run does only what is left, and with other tiles or sources it
    # is done again; what others' sources gave stays until then.
    kept = json.loads(results.path.read_text())
    assert [entry["key"] for entry in kept["entries"]] == list(states)
    again, others = (
        Results(tmp_path, "test", FACTS, {}, lambda _: None, **options)
        for options in ({}, {"source": lambda part: "two"})
    )
    done = {entry.key: again.is_done(entry.part, entry.key, entry.about) for entry in results.entries.values()}
    assert done == {key: state == "done" and key != "finds something wrong" for key, (state, _) in states.items()}
    assert not again.is_done("jobs_that_fail", "works, too", {"tile": 16})
    assert others.entries.keys() == again.entries.keys()
    assert not any(others.is_done(entry.part, entry.key, entry.about) for entry in results.entries.values())
    renewed = Results(tmp_path, "test", FACTS | {"triton": "another"}, {}, lambda _: None)
    assert not renewed.entries


def test_a_stage_that_is_cut_says_what_it_lacks(tmp_path: Path) -> None:
    settings = PoolSettings(tmp_path / "log", ("--rehearse", "--scratch", str(tmp_path)))
    part = PartRunner(PART, settings, time.monotonic() - 1)
    outcome = part.run(lambda facts: Results(tmp_path, "test", facts, {}))
    assert outcome.lacking == "out of time"


@pytest.mark.parametrize(
    ("stage", "state", "keeps"), [("check", "cut", True), ("numbers", "failed", True), ("check", "failed", False)]
)
def test_what_is_cut_while_it_is_measured_again_keeps_what_it_had(
    tmp_path: Path, stage: str, state: str, keeps: bool
) -> None:
    """So does a measurement that fails, but not a check."""

    def results(source: str = "one", **facts: Any) -> Results:
        noted = {"command": "a test", "commit": "abc"}
        return Results(tmp_path, stage, FACTS | facts, noted, lambda _: None, source=lambda part: source)

    first = results()
    entry = first.begun("part", "key", {})
    entry.rows, entry.state = [{"value": 1}, {"value": 2}], "done"
    first.write()
    again = results(source="another")
    entry = again.begun("part", "key", {})
    entry.rows.append({"value": 3})
    entry.state, entry.why = state, "late"
    again.write()
    (kept,) = results(source="another").entries.values()
    if not keeps:
        assert (kept.rows, kept.state) == ([{"value": 3}], "failed")
        return
    assert (kept.rows, kept.why) == ([{"value": 1}, {"value": 2}], "not measured again at abc: late")
    assert not results(source="another").is_done("part", "key", {})
    assert again.undone("part", [("key", {}), ("other", {})]) == 2
    entry.rows, entry.state = [{"value": 3}], "done"
    again.write()
    assert [kept.rows for kept in results(source="another").entries.values()] == [[{"value": 3}]]
    assert again.undone("part", [("key", {}), ("other", {})]) == 1
    # Another torch: what there was is kept beside.
    results(torch="another").write()
    assert len(list(tmp_path.glob("*.old"))) == 1
    assert not results(torch="another").entries
    results(torch="a third").write()
    results(torch="a fourth").write()
    assert len(list(tmp_path.glob("*.old"))) == 3


@pytest.mark.slow
def test_a_stage_that_is_stopped_leaves_no_process_and_no_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.stage", "serve", "--rehearse", "--scratch", str(tmp_path)]
    command += ["--output", str(tmp_path / "out"), "--only", "engine, tiny"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    stage = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    log = tmp_path / "out" / "gpu_serve.log"
    while not (log.exists() and "--- " in log.read_text()):
        assert stage.poll() is None
        time.sleep(0.1)
    (worker,) = psutil.Process(stage.pid).children()
    stage.terminate()
    assert stage.wait(15) != 0
    psutil.wait_procs([worker], timeout=15)
    assert not worker.is_running()
    assert not list(tmp_path.glob("smelt-*"))


def test_goals_are_arithmetic_on_rows() -> None:
    """Ten megabytes in five microseconds are two thirds of a copy at 3 TB/s; the worst shape counts."""
    about = {"method": goals.FOUR, "rows": 1, "outputs": 28672, "columns": 4096, "gate": "silu"}
    entries = [
        Entry("ceilings", "copy", {}, "done", rows=[{"copy_bytes_per_s": 3e12}]),
        Entry("linears", "a", about, "done", rows=[{"microseconds": 5.0, "bytes": 10_000_000}]),
        Entry("linears", "b", about | {"outputs": 128256}, "done", rows=[{"microseconds": 4.0, "bytes": 10_000_000}]),
        Entry("linears", "c", about | {"method": goals.BF16}, "done", rows=[{"microseconds": 20.0, "bytes": 1}]),
        Entry("linears", "d", about | {"outputs": 4096}, "done", rows=[{"microseconds": 10.0, "bytes": 15_000_000}]),
        Entry("attention", "e", {"method": "flash", "sequences": 1, "length": 4096}, "done", rows=[{"microseconds": 8.0}]),
        Entry("attention", "f", {"method": "torch cudnn", "sequences": 1, "length": 4096}, "done", rows=[{"microseconds": 6.0}]),
    ]  # fmt: skip
    reached = {goal["goal"]: goal["reached"] for goal in goals.of(entries)}
    assert reached["W4A16, 1 row, 14336 wide and more: share of the copy's rate"] == pytest.approx(2 / 3)
    assert reached["W4A16, 1 row, 4096x4096: share of the copy's rate"] == pytest.approx(0.5)
    assert reached["prompt of 4096: share of torch's best"] == pytest.approx(0.75)
    assert reached["prompt of 8192: share of torch's best"] is None
    assert not any("tokens/s" in goal for goal in reached)  # of a part that was not run


def test_tables_say_what_results_say(tmp_path: Path) -> None:
    about = {"format": "w4a16", "cache": "auto", "tiles": "1"}
    rows = [
        {"batch": 1, "tokens_per_s": 400.0, "weights_bytes": 3_000_000_000},
        {"batch": 1, "step_us": 2500.0, "busy_us": 2000.0},
        {"batch": 1, "kernel": "_linear_codes", "launches": 128.0, "microseconds": 1500.0},
    ]
    entries = [
        Entry("ceilings", "copy", {}, "done", rows=[{"copy_bytes_per_s": 3e12}]),
        Entry("decode", "w4a16", about, "done", rows=rows),
    ]
    facts = {"device": "GPU", "torch": "1", "triton": "2", "source": "s", "quick": False}
    results = Results(tmp_path, "numbers", facts, {"command": "run.sh numbers", "commit": "abc"}, lambda _: None)
    results.entries = {entry.identity: entry for entry in entries}
    results.goals = goals.of(entries)
    results.write()
    document = "before\n<!-- results: gpu decode -->\nold\n<!-- results end -->\nbetween\n<!-- results: gpu serving -->\n<!-- results end -->\n"
    found = documents.filled(document, tmp_path)
    assert "| w4a16 | 1 | 400.0 | 40% |" in found
    assert "`run.sh numbers`, GPU, torch 1, Triton 2, " in found
    assert ", commit abc." in found
    assert "old" not in found
    assert "Not measured yet: no GPU has run `benchmarks/gpu/run.sh serve`." in found
    assert documents.filled(found, tmp_path) == found
    assert "| 8B, batch 1, W4A16: tokens/s | 500 | 400 | no |" in documents.text_of("gpu goals", tmp_path)
    assert "| `_linear_codes` | 128 | 1500.0 |" in documents.text_of("gpu profile", tmp_path)


def test_the_wheels_need_nothing_that_is_not_there() -> None:
    assert unlisted() == set()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_rehearsal_finds_no_mistake(stage: str, tmp_path: Path) -> None:
    """On a CPU, in Triton's interpreter, on tiny shapes: every job that a GPU gets, as far as Python goes."""
    command = [REPOSITORY / "benchmarks/gpu/run.sh", stage, "--rehearse", "--output", tmp_path]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    log = tmp_path / f"gpu_{stage}.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    found = json.loads(next(tmp_path.glob("gpu_*_no-gpu-a-rehearsal.json")).read_text())
    assert found["entries"]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["ceilings", "rows"], marks=pytest.mark.slow),
        pytest.param(["attention", "linears", "tuning", "compile_all"], marks=pytest.mark.slow),
        pytest.param(["decode", "serving", "end_to_end"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_what_only_a_gpu_is_asked_is_rehearsed_on_one_that_launches_nothing(parts: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"{__package__}.on_mock_gpu", *parts]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["failures"] == []
    assert found["done"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "torch sees none here; --rehearse tries the code on a CPU"),
        (["numbers", "--rehearse"], "a rehearsal's results are none: give --output another folder"),
        (["serve", "--sanitizer", "memcheck"], "--sanitizer is for the stage check"),
        (["serving"], "invalid choice: 'serving'"),
    ],
)
def test_mistakes_get_a_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    output = [] if "--rehearse" in arguments else ["--output", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("TRITON_INTERPRET")
    done = subprocess.run(
        [REPOSITORY / "benchmarks/gpu/run.sh", *arguments, *output, "--only", "nothing is called so"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("changed", "decides"),
    [
        ("runtime/serve/app.py", []),
        ("benchmarks/gpu/stage.py", []),
        ("runtime/gpu/layers.py", ["decode"]),
        ("benchmarks/gpu/parts/decode.py", ["decode"]),
        ("runtime/kernels/rows/normalize_rows.py", ["small_cases", "decode"]),
        ("benchmarks/gpu/worker.py", ["small_cases", "decode"]),
    ],
)
def test_what_is_measured_again_after_a_change(
    changed: str, decides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("small_cases", "decode")
    before, reads = [source_hash(part) for part in parts], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads(path) + b"#" * (path == REPOSITORY / changed))
    assert [part for part, was in zip(parts, before, strict=True) if source_hash(part) != was] == decides
