"""The tool that proves refactorings: equal runs are equal, whatever differs is named, and it imports nothing of Smelt."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.same_bytes import running
from benchmarks.same_bytes.comparing import compare, differences
from benchmarks.same_bytes.digests import digests
from benchmarks.same_bytes.recipes import CheckedRun
from benchmarks.same_bytes.running import run_all

from ..tiny import REPOSITORY

RECIPE = "clip, scale search"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The output and the scratch directory of one recipe, as the command line makes them."""
    directory = tmp_path_factory.mktemp("same_bytes")
    places = ["--output", str(directory / "sums.json"), "--scratch", str(directory / "scratch")]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.same_bytes", "--only", RECIPE, *places], cwd=REPOSITORY, check=True
    )
    return directory / "sums.json", directory / "scratch"


def _results(output: Path) -> dict[str, Any]:
    return json.loads(output.read_text())


@pytest.mark.slow
def test_a_second_run_is_the_same_and_a_finished_one_is_not_repeated(
    measured: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = measured
    again = tmp_path / "again.json"
    assert run_all([RECIPE], again, tmp_path / "elsewhere") == 0
    assert compare(_results(output), _results(again)) == 0
    assert f"{RECIPE}: same\n" in capsys.readouterr().out
    kept = again.read_bytes()
    (tmp_path / "elsewhere" / "clip,_scale_search" / "recipe.yaml").unlink()
    assert run_all([RECIPE], again, tmp_path / "elsewhere") == 0
    assert again.read_bytes() == kept
    assert not (tmp_path / "elsewhere" / "clip,_scale_search" / "recipe.yaml").exists()


@pytest.mark.slow
def test_what_differs_is_named(measured: tuple[Path, Path]) -> None:
    output, scratch = measured
    result = _results(output)["results"][RECIPE]
    place = scratch / "clip,_scale_search"
    published = ("out/checkpoint", "out/report.json")
    assert digests(place, published) == result["files"]

    weights = place / "out" / "checkpoint" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("weight_packed"))
    tensors[name][0, 0] ^= 1
    save_file(tensors, weights)
    config = json.loads((place / "out" / "checkpoint" / "config.json").read_text())
    config["rms_norm_eps"] *= 2
    (place / "out" / "checkpoint" / "config.json").write_text(json.dumps(config))
    report = json.loads((place / "out" / "report.json").read_text())
    report["machine"]["cores"] += 1  # another machine is no difference
    report["models"][1]["layers"][0]["error"] += 1e-6
    (place / "out" / "report.json").write_text(json.dumps(report))
    (place / "out" / "checkpoint" / "README.md").unlink()

    changed = result | {"files": digests(place, published)}
    assert differences(result, changed) == [
        "out/checkpoint/README.md only in the first",
        "out/checkpoint/config.json (rms_norm_eps)",
        f"out/checkpoint/model.safetensors ({name})",
        "out/report.json (models[].layers[].error)",
    ]


def test_failures_count_as_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CheckedRun({"model": "builtin:smelt-6m", "output": "out", "steps": [{"quantize": {"scheme": "W4A17"}}]})
    monkeypatch.setitem(running.RECIPES, RECIPE, refused)
    assert run_all([RECIPE], tmp_path / "sums.json", tmp_path / "scratch") == 1
    result = _results(tmp_path / "sums.json")["results"][RECIPE]
    assert "W4A17" in result["error"]
    assert len(differences(result, result)) == 2
    assert differences(result, None) == ["only in the first"]


def test_types_and_shapes_are_part_of_a_tensors_digest(tmp_path: Path) -> None:
    found = []
    for shape, dtype in (((2, 3), torch.int32), ((3, 2), torch.int32), ((2, 3), torch.float32)):
        save_file({"a": torch.zeros(shape, dtype=dtype)}, tmp_path / "model.safetensors")
        found.append(digests(tmp_path, ("model.safetensors",))["model.safetensors"]["parts"]["a"])
    assert [each.rpartition(" ")[0] for each in found] == ["I32 [2, 3]", "I32 [3, 2]", "F32 [2, 3]"]


def test_nothing_of_smelt_is_imported() -> None:
    modules = set()
    for file in (REPOSITORY / "benchmarks" / "same_bytes").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1
                modules |= set() if node.level else {(node.module or "").split(".")[0]}
    assert modules - sys.stdlib_module_names <= {"torch", "transformers", "safetensors", "tokenizers"}
