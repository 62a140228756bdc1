"""Commands that are interrupted while they start: a status and a sentence, whatever is being imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SENTENCE = "smelt: interrupted; the same command without --fresh continues where this one stopped\n"
RECIPE = """\
model: builtin:smelt-6m
output: {output}
calibrate: {{samples: 2, length: 16}}
evaluate: {{windows: 2, length: 16, samples: 0, speed: false}}
steps:
  - quantize: {{scheme: W4A16, group_size: 64}}
"""
FEW = [0.0, 0.1, 0.3, 0.6, 1.0, 1.5]
MANY = [round(0.04 * step, 2) for step in range(75)]


def _listens(process: subprocess.Popen[str]) -> bool:
    """Whether a handler for terminations is there, which Python itself has none for."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def _interrupted(command: list[str], number: int, after: float) -> tuple[int, str, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "smelt.compress", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start what runs in the background with interrupts ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    deadline = time.monotonic() + 60
    while not _listens(process) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(after)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _check(delays: list[float], number: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(output=tmp_path / "out"))
    ended = []
    for delay in delays:
        status, _, err = _interrupted(["run", str(recipe), "--fresh"], number, delay)
        ended.append(status)
        assert (status, "interrupted" in err) in ((128 + number, True), (0, False)), (delay, status, err)
        if status == 128 + number:
            assert err.endswith(SENTENCE), (delay, err)
            assert err.count("smelt: interrupted") == 1
        assert "Traceback" not in err, (delay, err)
        checkpoint = tmp_path / "out" / "checkpoint"
        assert not checkpoint.exists() or (checkpoint / "smelt.json").exists()
    assert 128 + number in ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_it_starts(number: int, tmp_path: Path) -> None:
    _check(FEW[:: 2 if number == signal.SIGTERM else 1], number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_at_any_time(number: int, tmp_path: Path) -> None:
    _check(MANY, number, tmp_path)


def test_a_background_job_goes_on(tmp_path: Path) -> None:
    """A shell starts one with interrupts ignored."""
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' INT; exec {sys.executable} -m smelt.compress schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not _listens(process) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("{")


def test_one_of_several_processes_says_it(tmp_path: Path) -> None:
    """A launcher sends all of them the same. This command has nothing to go on with."""
    said = []
    for rank in "01":
        process = subprocess.Popen(
            [sys.executable, "-m", "smelt.compress", "schema"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"},
        )
        while not _listens(process) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        said.append((process.returncode, err))
    assert said == [(143, "smelt: interrupted\n"), (143, "")]
