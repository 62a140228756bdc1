"""``smelt bench``: options that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.compress.cli import app
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give a checkpoint to measure, or --calibrate FILE"),
        (["builtin:smelt-6m", "--ablate", "--policy", "mlfq"], "--ablate takes one step of a GPU apart and does not use --policy"),
        (["builtin:smelt-6m", "--ablate", "--compile"], "does not use --compile"),
        (["--calibrate", "nowhere/device.json"], "--calibrate: nowhere is not a directory"),
        (["builtin:smelt-6m", "--policy", "fifo"], "policy is 'fifo'; it must be"),
        (["builtin:smelt-6m", "--model", "large"], "--model names one of a server's models; give the server with --server"),
        (["builtin:smelt-6m", "--server", "http://localhost:1"], "--server measures what a server does with its own options and does not use CHECKPOINT; leave"),
        (["--server", "http://localhost:1", "--policy", "mlfq", "--kv-cache-dtype", "int8", "--no-native"], "does not use --policy, --kv-cache-dtype, --no-native; leave them out"),
        (["--server", "http://localhost:1", "--ablate", "--calibrate", "this.json"], "does not use --calibrate, --ablate"),
        (["--server", "http://localhost:1", "--device", "cuda", "--dtype", "float32", "--compile", "--exact-inputs", "--reproducible"], "does not use --dtype, --exact-inputs, --reproducible, --device, --compile"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    options: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["bench", *options])
    assert found.exit_code == 1
    assert sentence in found.stderr
    assert not list(tmp_path.iterdir())
