"""Two processes that train together learn what one learns, and go on where another number of them stopped."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import patch_environment
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from smelt.compress import Recipe, SmeltError, run
from smelt.distill.run.arrangement import Arrangement
from smelt.distill.run.checks import sharing_problems
from smelt.distill.settings import Training

from ...tiny import make_model, save_model
from .train_recipes import train

RECIPES = Path(__file__).parents[3] / "recipes" / "accelerate"
STEPS = 8
# Seven windows a step: shares that differ.
USUAL = {"tokens": STEPS * 7 * 32, "length": 32, "batch": 7, "learning_rate": 1e-3, "clip": 0.3}
IN_PASSES = {"tokens": STEPS * 6 * 32, "batch": 6, "accumulate": 2}  # a share of three, in passes of two and one


@dataclass(frozen=True)
class Case:
    """A training, how two processes hold it, and after how many steps the one or the two were interrupted."""

    architecture: str
    step: dict[str, Any]
    arrangement: str = "sharded"
    one_stops: int | None = None
    two_stop: int | None = None


def _distill(**changes: Any) -> dict[str, Any]:
    # Not from where the teacher stands: there the gradient is nothing but rounding.
    return {"distill": {**USUAL, "student": "random", **changes}}


def _quantize(scheme: str, **changes: Any) -> dict[str, Any]:
    train = {**USUAL, "learning_rate": 1e-5, **changes}
    return {"quantize": {"scheme": scheme, "group_size": 32, "train": train}}


CASES = {
    "sharded": Case("llama", _distill(**IN_PASSES, average=0.8, cross_entropy=0.5)),
    "a product beside rounded experts": Case("mixtral", _quantize("W4A16", lora=2)),
    "one, then two": Case("llama", _distill(average=0.8), one_stops=3),
    "two, then one": Case("llama", _distill(keep="best"), two_stop=3),
    "copies": Case("llama", _distill(**IN_PASSES, average=0.8, cross_entropy=0.5), "copies"),
    "tied, kept between passes": Case("qwen2", _distill(checkpointing=True, loss="reverse_kl"), "sharded, kept"),
    "stored teacher, small states": Case("mistral", _distill(stored=16, small_states=True)),
    "hidden states, attention": Case("llama", _distill(hidden=1.0, attention=1.0)),
    "on policy": Case("llama", _distill(data={"writer": "student", "prompt": 8, "share": 0.5})),
    "rounded": Case("llama", _quantize("W3A16")),
    "upper bits": Case("llama", _quantize("W4in8")),
    "small states: one, then two": Case("llama", _distill(small_states=True), one_stops=3),
    "small states: two, then one": Case("llama", _distill(small_states=True), two_stop=3),
    "copies, then one": Case("llama", _distill(average=0.8), "copies", two_stop=3),
    "rounded: two, then one": Case("llama", _quantize("W4A16"), two_stop=3),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """For each case what one process made, and what two made or had a part in."""
    room = tmp_path_factory.mktemp("training")
    found, jobs = {}, []
    for number, (name, case) in enumerate(CASES.items()):
        model = room / f"model-{case.architecture}"
        if not model.exists():
            save_model(make_model(case.architecture, torch.float32), model)
        found[name] = room / f"{number}-one", room / f"{number}-two"
        calibrate = {"samples": 4, "length": 32}
        recipe = {"model": str(model), "calibrate": calibrate, "evaluate": False, "steps": [case.step]}
        jobs.append((case, [{**recipe, "output": str(output)} for output in found[name]]))
    for case, (_, together) in jobs:
        if case.one_stops:
            train(together, case.one_stops)
    (room / "jobs.json").write_text(
        json.dumps(
            [
                {"recipe": together, "arrangement": case.arrangement, "steps": case.two_stop}
                for case, (_, together) in jobs
            ]
        )
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(RECIPES / "one-node.yaml")]
    script = [str(Path(__file__).with_name("train_recipes.py")), str(room / "jobs.json")]
    process = subprocess.Popen(
        [*launcher, "--num_processes", "2", "--main_process_port", "0", *script],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _, (alone, _) in jobs:
            run(Recipe.model_validate(alone), progress=False)
        _, errors = process.communicate()
    finally:
        process.terminate()
    assert process.returncode == 0, errors
    for case, (_, together) in jobs:
        if case.two_stop:
            assert len(list(Path(together["output"]).glob("journal/step-0/snapshot-*"))) == (
                1 if case.arrangement == "copies" else 2
            )
            run(Recipe.model_validate(together), progress=False)
    return found


def _curve(output: Path) -> list[dict[str, float]]:
    (table,) = output.glob("training-*.csv")
    with table.open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(outputs: dict[str, tuple[Path, Path]]) -> None:
    for name, (one, two) in outputs.items():
        wanted, found = _curve(one), _curve(two)
        assert len(found) == STEPS
        tolerance = 0.02 if "small states" in name else 2e-3
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-6), name
        ours, theirs = (load_file(each / "checkpoint" / "model.safetensors") for each in (two, one))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            if tensor.is_floating_point():
                apart = (ours[key].float() - tensor.float()).norm() / tensor.float().norm().clamp_min(1e-6)
                assert apart < tolerance, (name, key)
            else:
                assert (ours[key] == tensor).float().mean() > 0.98, (name, key)


@pytest.mark.parametrize("name", [path.name for path in RECIPES.glob("*.yaml")])
def test_shipped_launches_say_how_weights_lie(name: str) -> None:
    """The environment that accelerate's launcher, which reads the file, gives each process."""
    shown = "import os, json; print(json.dumps(dict(os.environ)))"
    shapes = {"one-node.yaml": (8, 1), "two-nodes.yaml": (16, 2), "copies.yaml": (8, 8)}
    settings = launch_command_parser().parse_args(["--config_file", str(RECIPES / name), "-m", shown])
    settings, _, _ = _validate_launch_command(settings)
    environment = prepare_multi_gpu_env(settings)
    count, replicas = shapes[name]
    assert settings.num_processes == count
    with patch_environment(**environment):
        assert Arrangement.of_launcher(count) == Arrangement(replicas)


REFUSED = [
    ({"FSDP_OFFLOAD_PARAMS": "true"}, "main memory"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision: bf16"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 2"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "checkpointing: true in the recipe"),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}, "TP parallelism"),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}, "CP parallelism"),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}, "SP parallelism"),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "0"}, "must be at least 1"),
    (
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3"},
        "3 copies sharded over 1 processes each, but 2 processes were started",
    ),
]


@pytest.mark.parametrize(("environment", "said"), REFUSED)
def test_launcher_settings_that_are_not_supported_are_refused(environment: dict[str, str], said: str) -> None:
    with patch_environment(**environment), pytest.raises(SmeltError, match=said):
        Arrangement.of_launcher(2)


def test_too_few_windows_for_all_processes_are_reported_before_any_work() -> None:
    settings = Training(tokens=10_000, batch=12, accumulate=4)
    assert not sharing_problems(settings, None, 3, "steps.0")
    (problem,) = sharing_problems(settings, None, 4, "steps.0")
    assert "a batch of 12 windows cannot be split over 4 processes in 4 passes each" in problem.what
