"""``kill -9`` at any moment, the same command again: it continues, and the bytes are those of a quiet run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.cli import app
from smelt.compress.pipeline.pipeline import run as run_again
from smelt.system.interrupts import remembered_interrupts
from smelt.system.progress import Progress
from typer.testing import CliRunner

FILES = ("checkpoint", "report.json", "report.md")


def _bytes(out: Path) -> dict[str, bytes]:
    found = [f for name in FILES for f in ([out / name] if (out / name).is_file() else sorted((out / name).rglob("*")))]
    return {str(f.relative_to(out)): f.read_bytes() for f in found if f.is_file()}


def _start(recipe_file: Path, out: Path) -> subprocess.Popen[bytes]:
    # Tests that run in the background of a shell are started with interrupts ignored, which a child would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "smelt.compress", "run", str(recipe_file), "--output", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def _recipe_file(tmp_path: Path, model: Path, scheme: str = "W4A16") -> Path:
    group = {"group_size": 32} if scheme == "W4A16" else {}
    data = {
        "model": str(model),
        "output": "unused",
        "calibrate": {"samples": 64, "length": 128},
        "evaluate": {"windows": 8, "length": 64, "speed": False},
        "steps": [{"quantize": {"scheme": scheme, "rounding": "gptq", **group}}],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(data))
    return path


def _when(out: Path, moment: str) -> bool:
    journal = out / "journal"
    parts = len(list(journal.glob("step-0/*.safetensors"))) if journal.exists() else 0
    return {
        "started": (journal / "run.json").exists(),
        "after one block": parts >= 1,
        "after three blocks": parts >= 3,
        "writing": (out / "checkpoint.partial").exists(),
        "published": (out / "checkpoint").exists(),
    }[moment]


MOMENTS = ("started", "after one block", "after three blocks", "writing", "published")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "moments"),
    [
        ("W4A16", ("after one block", "published")),
        *(pytest.param(scheme, MOMENTS, marks=pytest.mark.slow) for scheme in ("W4A16", "W8A8")),
    ],
)
def test_killed_at_many_moments_and_continued(
    scheme: str, moments: tuple[str, ...], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=5)
    recipe_file = _recipe_file(tmp_path, model, scheme)
    run(Recipe.load(recipe_file, [f"output={tmp_path / 'quiet'}"]), progress=False)
    killed = 0
    out = tmp_path / "out"
    for moment in moments:
        process = _start(recipe_file, out)
        while process.poll() is None and not _when(out, moment):
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
        assert not (out / "report.json").exists() or moment == "published"
    assert killed >= max(1, len(moments) - 2)  # the last two moments are short and may be missed
    last = CliRunner().invoke(app, ["run", str(recipe_file), "--output", str(out)])
    assert last.exit_code == 0, last.stderr
    assert _bytes(out) == _bytes(tmp_path / "quiet")


def test_finished_blocks_are_not_done_again(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_file = _recipe_file(tmp_path, tiny("llama", torch.bfloat16))
    recipe = Recipe.load(recipe_file, [f"output={tmp_path / 'out'}"])
    from smelt.models.steps import block_loop as step

    done: list[Path] = []
    save = step.save_part

    def interrupted(path: Path, *rest: object) -> None:
        save(path, *rest)  # type: ignore[arg-type]
        done.append(path)
        if len(done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(step, "save_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    assert not (tmp_path / "out" / "checkpoint.partial").exists()
    done.append(tmp_path)
    run_again(recipe)
    assert [path.name for path in done if path != tmp_path] == [f"block-0000{i}.safetensors" for i in range(3)]


def test_an_interrupt_ends_with_one_sentence(tiny: Callable[..., Path], tmp_path: Path) -> None:
    process = _start(_recipe_file(tmp_path, tiny("llama", torch.bfloat16, num_hidden_layers=6)), tmp_path / "out")
    while process.poll() is None and not _when(tmp_path / "out", "after one block"):
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert process.stderr is not None
    message = process.stderr.read().decode()
    assert message == "smelt: interrupted; the same command continues where this one stopped\n"


@pytest.fixture
def default_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ignored_interrupts_stay_ignored(default_interrupts: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with remembered_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert list(Progress(False).track(range(2), "working")) == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_that_falls_into_a_destructor_still_ends_the_work(default_interrupts: None) -> None:
    class Dropped:
        def __del__(self) -> None:
            with pytest.raises(KeyboardInterrupt):  # what Python itself does with it, without the warning
                signal.raise_signal(signal.SIGINT)

    done: list[int] = []

    def work() -> None:
        for item in Progress(False).track(range(4), "working"):
            done.append(item)
            if item == 1:
                Dropped()

    with remembered_interrupts(), pytest.raises(KeyboardInterrupt):
        work()
    assert done == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    recipe_file = _recipe_file(tmp_path, tiny("qwen3", torch.bfloat16))
    results = [
        run(Recipe.load(recipe_file, [f"output={tmp_path / name}", f"seed={seed}"])).checkpoint
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    first, again, other = ((path / "model.safetensors").read_bytes() for path in results)
    assert first == again
    assert first != other
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
