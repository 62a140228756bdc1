"""Distillations that are interrupted, killed or run out of disk."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress import Recipe, SmeltError, run
from smelt.distill.run.training_text import training_windows
from smelt.distill.run.written_text import written_by
from smelt.distill.settings import TrainingText
from smelt.system.progress import Progress
from transformers import AutoTokenizer

from ...tiny import SMELT_6M
from .small import TRAINING, Make

# The command line, but for a snapshot after every step.
ALWAYS_SAVING = """
from smelt.compress.cli import main
from smelt.distill.training import trainer
trainer._SNAPSHOT_SECONDS, trainer._SNAPSHOT_SHARE = 0.0, 1e9
main()
"""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    data = {
        "model": str(tiny(dtype=torch.bfloat16)),
        "output": "unused",
        "calibrate": {"samples": 4, "length": 32},
        "evaluate": False,
        "steps": [{"distill": {**TRAINING, "tokens": 40 * 4 * 32, "cross_entropy": 0.5, "average": 0.95}}],
    }
    recipe.write_text(json.dumps(data))
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    command = [sys.executable, "-c", ALWAYS_SAVING, "run", str(recipe), "--output", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    snapshot = killed / "journal" / "step-0" / "snapshot.json"
    while not snapshot.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert snapshot.exists()
    assert not (killed / "checkpoint").exists()
    for out in (killed, quiet):
        run(Recipe.model_validate({**data, "output": str(out)}), progress=False)
    # Every file: no time, date or place of either run is in them.
    one, other = ({f.name: f.read_bytes() for f in (out / "checkpoint").iterdir()} for out in (killed, quiet))
    assert {"model.safetensors", "smelt.json", "README.md"} <= one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    rows = list(csv.DictReader((killed / "training-step-0.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["student", pytest.param("teacher", marks=pytest.mark.slow)])
def test_written_text_is_the_same_after_an_interruption(
    writer: str, distilled: Make, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pruned = tiny(), {"prune": {"structure": "blocks", "count": 1}}
    data = {"source": "builtin", "writer": writer, "prompt": 8, **({"share": 0.6} if writer == "student" else {})}
    recipe = distilled(path, pruned, data=data, tokens=10 * 4 * 32)
    quiet = recipe.model_copy(update={"output": str(tmp_path / "quiet")})
    result = run(quiet, progress=False)
    track = Progress.track

    def stopped(progress: Progress, items: Any, *rest: Any) -> Any:
        for number, item in enumerate(track(progress, items, *rest)):
            if isinstance(items, range) and len(items) == 10 and number == 5:
                raise KeyboardInterrupt
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "track", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, progress=False)
    again = run(recipe, progress=False)
    one, other = (load_file(each.checkpoint / "model.safetensors") for each in (again, result))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_changed_recipe_is_not_continued(
    distilled: Make, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny()
    with monkeypatch.context() as patch:
        patch.setattr("smelt.distill.training.trainer.Trainer._snapshot", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(distilled(path), progress=False)
    changed = distilled(path, learning_rate=1e-3)
    with pytest.raises(SmeltError, match=r"distill\.learning_rate: 0\.002 -> 0\.001"):
        run(changed, progress=False)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_noticed_while_text_is_tokenized(tmp_path: Path) -> None:
    """numpy's own way of writing loses the error, and zeros would be what is trained on."""
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    text = TrainingText(source="builtin", writer="teacher", prompt=4).text()
    path = tmp_path / "text.bin"
    path.with_name("text.bin.partial").symlink_to("/dev/full")
    with pytest.raises(SmeltError, match="the disk is full"):
        training_windows(text, tokenizer, 16, 70, path, Progress(False))
    assert not path.exists()


@pytest.mark.parametrize("left", [0, 45, 70, 86])
def test_text_that_is_written_again_is_what_it_would_have_been(left: int, tmp_path: Path) -> None:
    """Whatever was in the file when it was killed, also held-out windows: these never become training windows."""
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    settings = TrainingText(source="builtin", writer="teacher", prompt=4)
    windows = training_windows(settings.text(), tokenizer, 16, 70, tmp_path / "text.bin", Progress(False))

    class Fake:
        def continued(self, prompts: torch.Tensor, temperature: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed)
            more = torch.randint(100, (len(prompts), 16 - prompts.shape[1]), generator=generator)
            tokens = torch.cat((prompts, more), dim=1)
            return tokens, tokens % 3 > 0

        def close(self) -> None:
            closed.append(True)

    def written(path: Path) -> bytes:
        written_by(Fake, settings, windows, path, 1, Progress(False))  # type: ignore[arg-type]
        return path.read_bytes() + path.with_suffix(".learned").read_bytes()

    closed: list[bool] = []
    expected = written(tmp_path / "whole.bin")
    assert closed == [True]
    tokens, learned = (
        expected[: (windows.count + windows.kept) * windows.nbytes],
        expected[-16 * (windows.count + windows.kept) :],
    )
    (tmp_path / "again.bin.partial").write_bytes(tokens[: left * windows.nbytes])
    (tmp_path / "again.learned.partial").write_bytes(learned[: left * 16])
    assert written(tmp_path / "again.bin") == expected
