"""Calibration and rounding on a GPU, against the same on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run

from ..compress.pipeline.test_device import CASES
from ..compress.pipeline.test_processes import launched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _recipes(case: str, tiny: Callable[..., Path], tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    architecture, step = CASES[case]
    calibrate = {"samples": 80, "length": 64}
    usual = {"model": str(tiny(architecture)), "steps": [step], "evaluate": False}
    cpu, gpu = (
        {**usual, "output": str(tmp_path / device), "calibrate": {**calibrate, "device": device}}
        for device in ("cpu", "cuda")
    )
    return cpu, gpu


def _errors(recipe: dict[str, Any]) -> dict[str, float]:
    made = run(Recipe.model_validate(recipe), progress=False).checkpoint
    (step,) = json.loads((made / "smelt.json").read_text())["steps"]
    return {layer["name"]: layer["error"] for layer in step["layers"]}


@pytest.mark.parametrize("case", CASES)
def test_layers_lose_on_a_gpu_what_they_lose_on_a_cpu(case: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    cpu, gpu = _recipes(case, tiny, tmp_path)
    expected = _errors(cpu)
    assert expected
    assert _errors(gpu) == pytest.approx(expected, rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_leave_what_one_leaves(tiny: Callable[..., Path], tmp_path: Path) -> None:
    _, gpu = _recipes("awq and gptq, continued", tiny, tmp_path)
    expected = _errors(gpu)
    again = {**gpu, "output": str(tmp_path / "two")}
    (tmp_path / "recipe.yaml").write_text(json.dumps(again))
    process = launched(["-m", "smelt.compress", "run", str(tmp_path / "recipe.yaml")])
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert _errors(again) == pytest.approx(expected, rel=0.01)
