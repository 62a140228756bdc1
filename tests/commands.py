"""Every command that opens a model directory, run in this process as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from smelt.compress.cli import app
from typer.testing import CliRunner

_RECIPE = {
    "calibrate": {"samples": 2, "length": 16},
    "evaluate": False,
    "steps": [{"quantize": {"scheme": "W8A16", "group_size": 32, "rounding": "nearest"}}],
}
COMMANDS = ("run", "dry-run", "inspect", "bench", "chat", "gguf", "eval")


def invoke(command: str, model: Path, scratch: Path, *options: str, typed: bytes = b"hello there\n/quit\n") -> Result:
    """Run one of :data:`COMMANDS` on a model.

    Args:
        command: which.
        model: its directory.
        scratch: a directory for what is written.
        options: further ones of the command.
        typed: what ``chat`` reads.
    """
    recipe = scratch / "recipe.yaml"  # JSON is YAML
    recipe.write_text(json.dumps(_RECIPE | {"model": str(model), "output": str(scratch / command)}))
    arguments = {
        "run": ["run", str(recipe)],
        "dry-run": ["run", str(recipe), "--dry-run"],
        "inspect": ["inspect", str(model), "--json"],
        "bench": [
            "bench",
            str(model),
            *["--prompt", "4", "--output", "2", "--concurrency", "1", "--requests", "1", "--dtype", "float32"],
        ],
        "chat": ["chat", str(model), "--max-tokens", "2", "--no-native"],
        "gguf": ["export", str(model), "--to", "gguf", "--output", str(scratch / "model.gguf"), "--fresh"],
        "eval": [
            "eval",
            str(model),
            *["--speed", "none", "--windows", "1", "--length", "16", "--samples", "0"],
            "--output",
            str(scratch / "eval"),
        ],
    }[command]
    return CliRunner().invoke(app, [*arguments, *options], input=typed)


def refusal(result: Result) -> str:
    """The sentence on standard error of a command that failed as it should: no traceback, and a few lines at most."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    said = [
        line for line in (result.stderr + result.stdout).splitlines() if "problem" in line or line.startswith("smelt: ")
    ]
    assert "Traceback" not in result.output
    assert 0 < len(result.stderr.splitlines()) <= 12 or said
    return result.output
