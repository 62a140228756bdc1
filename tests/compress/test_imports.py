"""What answers without torch, which takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ..tiny import REPOSITORY
from . import report_samples

RUN = """
import contextlib, io, json, sys

answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, status, said = ["smelt", *arguments], 0, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            from smelt.compress.__main__ import main
            main()
        except SystemExit as ended:
            status = ended.code
    large = ("torch", "transformers", "compressed_tensors", "numpy", "scipy", "jinja2", "datasets")
    answers.append((status, [name for name in large if name in sys.modules], said.getvalue()))
print(json.dumps(answers))
"""
COMMANDS = ["run", "eval", "sweep", "compare", "inspect", "export", "merge", "chat", "bench", "schema", "kernels"]
HELP = [
    [*command, "--help"] for command in ([], *([name] for name in COMMANDS), ["kernels", "check"], ["kernels", "tune"])
]
MISTAKES = [
    [command, str(REPOSITORY / "recipes" / recipe), "--set", override]
    for command, recipe in (("run", "quickstart.yaml"), ("sweep", "sweep-quickstart.yaml"))
    for override in ("sed=1", "steps.0.quantize.scheme=W9", "steps.0.quantize.rounding=gptx")
]
OPTIONS = ["--fail-if=ppl", "--tasks=,", "--speed=prompt", "--text=~nosuchuser", "--length=1"]
Answers = dict[str, tuple[int, list[str], str]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Each command's status, the large packages loaded so far and what was printed; one process runs them all, in order."""
    output = ["--output", str(tmp_path_factory.mktemp("eval") / "out")]
    commands = [*HELP, *MISTAKES, *(["eval", "builtin:smelt-6m", option, *output] for option in OPTIONS)]
    names = [*map(" ".join, [*HELP, *MISTAKES]), *OPTIONS]
    return dict(zip(names, _answers(commands), strict=True))


def _answers(commands: list[list[str]]) -> list[tuple[int, list[str], str]]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help(command: list[str], answers: Answers) -> None:
    status, loaded, said = answers[" ".join(command)]
    assert (status, loaded) == (0, [])
    assert "Usage" in said


@pytest.mark.parametrize("command", MISTAKES, ids=lambda command: f"{command[0]} {command[-1]}")
def test_mistakes_in_recipes(command: list[str], answers: Answers) -> None:
    status, loaded, said = answers[" ".join(command)]
    assert (status, loaded) == (1, [])
    assert said.startswith(f"smelt: --set {command[-1]}: ")


def test_two_reports_are_compared_without_torch(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report_samples.full().as_data()))
    command = ["compare", str(tmp_path), str(tmp_path), "--output", str(tmp_path / "out")]
    ((status, loaded, said),) = _answers([command])
    assert status == 0, said
    assert "torch" not in loaded
    assert len(list((tmp_path / "out").rglob("report.html"))) == 3


def test_every_shipped_recipe_is_read_and_checked() -> None:
    code = f"""
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from smelt.compress.recipe.file import read_document, validated
from smelt.compress.recipe.recipe import Recipe
for path in Path({str(REPOSITORY / "recipes")!r}).glob("*.yaml"):
    document = read_document(path, [])
    document.data.pop("sweep", None)
    validated(Recipe, document, path)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("option", OPTIONS)
def test_mistakes_in_options(option: str, answers: Answers) -> None:
    status, loaded, _ = answers[option]
    assert status in (1, 2)
    assert "torch" not in loaded


ABSENT = """
import importlib.abc, importlib.metadata, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lm_eval", "datasets", "gguf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
known = importlib.metadata.version

def version(name):
    if name in ("smelt", "lm-eval"):
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

importlib.metadata.version = version
import smelt.distill, smelt.prune, smelt.quant
from smelt.compress import Recipe, run
from smelt.system.versions import versions
from smelt.runtime import Engine, SamplingParams

recipe = Recipe.model_validate(json.loads(sys.argv[1]))
made = run(recipe, progress=False)
Engine(made.checkpoint, quiet=True).generate([[5, 6, 7]], SamplingParams(max_tokens=2))
print(json.dumps(versions("lm-eval")))
"""


def test_a_checkout_runs_without_being_installed_and_without_what_evaluates(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """A GPU machine without a network has torch, transformers and triton, and a few wheels that were carried there."""
    recipe = {"model": str(tiny("llama")), "output": str(tmp_path / "out"), "evaluate": False}
    recipe["steps"] = [{"quantize": {"scheme": "W4A16", "rounding": "nearest", "group_size": 32}}]
    done = subprocess.run(
        [sys.executable, "-c", ABSENT, json.dumps(recipe)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    versions = json.loads(done.stdout.strip().splitlines()[-1])
    assert versions["smelt"] == tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert versions["lm-eval"] == "not installed"
