"""What answers without torch, which takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..tiny import REPOSITORY

RUN = """
import json, sys
sys.argv = ["smelt", *json.loads(sys.argv[1])]
try:
    from smelt.compress.__main__ import main
    main()
finally:
    loaded = [name for name in ("torch", "transformers", "compressed_tensors", "numpy", "datasets") if name in sys.modules]
    print("loaded:", loaded, file=sys.stderr)
"""
COMMANDS = ["run", "eval", "sweep", "compare", "inspect", "export", "merge", "chat", "bench", "schema", "kernels"]


def _answer(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(arguments)], capture_output=True, text=True, check=False
    )
    *said, loaded = done.stderr.strip().split("\n")
    return done.returncode, loaded, done.stdout + "\n".join(said)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["kernels", "check"], ["kernels", "tune"]])
def test_help(command: list[str]) -> None:
    status, loaded, said = _answer(*command, "--help")
    assert (status, loaded) == (0, "loaded: []")
    assert "Usage" in said


@pytest.mark.parametrize("override", ["sed=1", "steps.0.quantize.scheme=W9", "steps.0.quantize.rounding=gptx"])
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_mistakes_in_recipes(command: str, override: str) -> None:
    recipe = "quickstart.yaml" if command == "run" else "sweep-quickstart.yaml"
    status, loaded, said = _answer(command, str(REPOSITORY / "recipes" / recipe), "--set", override)
    assert (status, loaded) == (1, "loaded: []")
    assert said.startswith(f"smelt: --set {override}: ")


def test_every_shipped_recipe_is_read_and_checked() -> None:
    code = f"""
import sys
from pathlib import Path
from smelt.compress.recipe_file import read_document, validated
for path in Path({str(REPOSITORY / "recipes")!r}).glob("*.yaml"):
    document = read_document(path, [])
    document.data.pop("sweep", None)
    validated(document, path)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("option", ["--fail-if=ppl", "--tasks=,", "--speed=prompt", "--text=~nosuchuser", "--length=1"])
def test_mistakes_in_options(option: str, tmp_path: Path) -> None:
    status, loaded, _ = _answer("eval", "builtin:smelt-6m", option, "--output", str(tmp_path / "out"))
    assert status in (1, 2)
    assert "torch" not in loaded
