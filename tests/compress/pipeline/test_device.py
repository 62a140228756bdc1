"""Calibrating elsewhere than on the CPU, as far as it can be tried without a GPU: on a device that pretends to be one."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.pipeline.plan import Plan

from ...tiny import REPOSITORY
from .test_processes import CASES

# Single steps whose settings decide everything.
CASES = {
    name: (architecture, {"quantize": quantize})
    for name, (architecture, quantize, _) in CASES.items()
    if quantize.get("scheme", "auto") != "auto"
} | {
    "2:4": ("llama", {"prune": {"structure": "2:4", "update": "sparsegpt"}}),
    "wanda": ("mixtral", {"prune": {"structure": "weights", "sparsity": 0.5}}),
    "heads": ("mixtral", {"prune": {"structure": "heads", "ratio": 0.5, "score": "taylor", "update": "least_squares"}}),
    "directions": ("qwen3", {"prune": {"structure": "hidden", "ratio": 0.5}}),
    "experts": ("mixtral", {"prune": {"structure": "experts", "count": 1}}),
    "channels shared out": (
        "llama",
        {"prune": {"structure": "ffn", "ratio": 0.5, "score": "taylor", "allocation": "sensitivity"}},
    ),
    "channels": ("opt", {"prune": {"structure": "ffn", "ratio": 0.5, "update": "least_squares"}}),
}
SHORT = {"tokens": 4 * 4 * 32, "length": 32, "batch": 4}
TRAINED = {
    "all that is compared": ("llama", {"distill": {**SHORT, "hidden": 1.0, "attention": 1.0, "cross_entropy": 0.5}}),
    "a stored teacher": (
        "gpt_neox",
        {"distill": {**SHORT, "stored": 8, "cross_entropy": 0.5, "small_states": True, "average": 0.9}},
    ),
    "rounded weights": ("llama", {"quantize": {"scheme": "W4A16", "group_size": 32, "train": SHORT}}),
    "rounded inputs and cache": (
        "llama",
        {"quantize": {"scheme": "W8A8", "kv_cache": "int8", "train": {**SHORT, "lora": 2}}},
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_here_is_a_problem_of_the_plan(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    asked = recipe(tiny(), {"calibrate": {"samples": 8, "length": 32, "device": "cuda"}})
    (problem,) = Plan.make(asked).problems
    assert str(problem) == "calibrate.device: device is 'cuda', but torch sees no GPUs here; use cpu"


@pytest.mark.slow
def test_no_tensor_is_left_behind_on_the_cpu_and_layers_lose_the_same(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    recipes, found = _pretended(CASES, tiny, tmp_path)
    for recipe, layers in zip(recipes, found, strict=True):
        made = run(Recipe.model_validate(recipe), progress=False).checkpoint
        (step,) = json.loads((made / "smelt.json").read_text())["steps"]
        expected = {layer["name"]: layer["error"] for layer in step["layers"]}
        assert expected
        assert layers == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_training_leaves_nothing_on_the_cpu_and_has_the_same_curve(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipes, found = _pretended(TRAINED, tiny, tmp_path)
    for name, recipe, curve in zip(TRAINED, recipes, found, strict=True):
        run(Recipe.model_validate(recipe), progress=False)
        rows = list(csv.DictReader((Path(recipe["output"]) / "training-step-0.csv").open()))
        assert len(curve) == 2 * len(rows) == 8
        for row in rows:
            # A sum that ends in another last bit is another code, where inputs are rounded, and from the second step on another weight.
            near = 1e-3 if "inputs" not in name else 5e-3 if row is rows[0] else 0.1
            assert curve[f"{row['step']} loss"] == pytest.approx(float(row["loss"]), rel=near)
            assert curve[f"{row['step']} gradient_norm"] == pytest.approx(float(row["gradient_norm"]), rel=4 * near)


def _pretended(
    cases: dict[str, tuple[str, dict[str, Any]]], tiny: Callable[..., Path], tmp_path: Path
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Recipes of single steps, and each one's record on the device."""
    recipes: list[dict[str, Any]] = []
    for number, (architecture, step) in enumerate(cases.values()):
        recipes.append(
            {
                "model": str(tiny(architecture)),
                "output": str(tmp_path / str(number)),
                "calibrate": {"samples": 80, "length": 64},
                "evaluate": False,
                "steps": [step],
            }
        )
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    command = [sys.executable, "-m", "tests.compress.pipeline.pretend_device", str(tmp_path / "recipes.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return recipes, json.loads(done.stdout.splitlines()[-1])
