"""Two processes that share the calibration leave the bytes that one leaves, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.commands.common.launched import on_processes
from smelt.compress.pipeline.plan import Plan
from smelt.compress.pipeline.verify import whole_model_bytes
from smelt.system.hardware.resources import compute_dtype
from smelt.system.processes.process_group import Processes
from smelt.system.storage import measurement_cache as cache

from ...interruption import interrupt_after
from ...tiny import make_model, save_model

# 2,048 tokens are a batch, and processes share batches: these make three.
THREE_BATCHES = {"samples": 80, "length": 64}
UNREACHABLE = {"scheme": "W4A16", "group_size": 32, "guard": {"max_layer_error": 1e-4, "otherwise": "fail"}}

SHARED_OUT = {"allocation": "sensitivity", "multiple": 32}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "awq and gptq, continued": (
        "llama",
        {"scheme": "W4A16", "group_size": 32, "transforms": ["awq"], "rounding": "gptq"},
        {},
    ),
    "signround, the head too": (
        "mistral",
        {"scheme": "W3A16", "group_size": 32, "rounding": {"method": "signround", "iterations": 6}, "ignore": []},
        {},
    ),
    "static inputs and cache, and one process without windows": (
        "llama",
        {
            "scheme": "W8A8",
            "inputs": "static_asymmetric",
            "kv_cache": {"dtype": "int8", "scales": "head"},
            "transforms": ["smooth"],
        },
        {"calibrate": {"samples": 8, "length": 64}},
    ),
    "errors made up for, and one process without windows": (
        "llama",
        {
            "scheme": "W4A8",
            "group_size": 32,
            "transforms": ["smooth"],
            "rounding": {"method": "gptq", "error_aware": 0.5},
        },
        {"calibrate": {"samples": 8, "length": 64}},
    ),
    "by weights alone": ("mixtral", {"scheme": "W4A16", "group_size": 32, "transforms": ["equalize"]}, {}),
    "fewer experts": (
        "mixtral",
        {},
        {
            "steps": [
                {"prune": {"structure": "hidden", "ratio": 0.25, "score": "taylor"}},
                {"prune": {"structure": "experts", "count": 1, "score": "taylor"}},
                {"prune": {"structure": "hidden", "ratio": 0.5, "score": "activation"}},
            ]
        },
    ),
    "experts": ("mixtral", {"scheme": "W4A16", "group_size": 32, "transforms": ["clip"], "rounding": "gptq"}, {}),
    "pruned first": (
        "llama",
        {},
        {
            "steps": [
                {"prune": {"structure": "blocks", "score": "loss", "count": 1}},
                {"prune": {"structure": "hidden", "ratio": 0.25}},
                {"prune": {"structure": "heads", "ratio": 0.5, "score": "taylor"}},
                {"prune": {"structure": "ffn", "ratio": 0.5, "update": "least_squares", **SHARED_OUT}},
                {"prune": {"structure": "2:4", "update": "sparsegpt"}},
                {"quantize": {"scheme": "W4A16", "group_size": 32, "rounding": "gptq"}},
            ]
        },
    ),
    "a guard": (
        "gpt_neox",
        {
            "scheme": "W2A16",
            "group_size": 32,
            "transforms": ["rotate", "equalize"],
            "rounding": "gptq",
            "guard": {"max_layer_error": 0.4, "otherwise": "fallback"},
        },
        {},
    ),
    "chosen formats": (
        "llama",
        {"scheme": "auto", "candidates": ["W4A16", "W8A16"], "group_size": 32, "target": {"bits": 6}},
        {},
    ),
    "measured": (
        "llama",
        {"scheme": "W4A16", "group_size": 32},
        {"evaluate": {"windows": 4, "length": 64, "speed": False}},
    ),
}
FEW = {name: CASES[name] for name in ("awq and gptq, continued", "pruned first")}


def launched(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    # As many threads as here: more of them would add up products in another order.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [*launcher, *arguments], env={**os.environ, **threads}, stderr=subprocess.PIPE, text=True, **options
    )


def _recipe(model: Path, quantize: dict[str, Any], top: dict[str, Any], output: Path) -> dict[str, Any]:
    usual = {"calibrate": THREE_BATCHES, "evaluate": False}
    return {"model": str(model), "output": str(output), "steps": [{"quantize": quantize}], **usual, **top}


def _result(output: Path) -> dict[str, bytes]:
    found = [*sorted((output / "checkpoint").iterdir()), output / "report.json", output / "report.md"]
    return {path.name: path.read_bytes() for path in found}


def _said(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("smelt: ")]


@dataclass(frozen=True)
class Both:
    """What one process and two have made of the same recipes, and how the two ended with one that must fail."""

    outputs: dict[str, tuple[Path, Path]]
    failed: Path
    status: int
    errors: str


@pytest.fixture(scope="module", params=[FEW, pytest.param(CASES, marks=pytest.mark.slow)], ids=["few", "all"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    room = tmp_path_factory.mktemp("processes")
    recipes, outputs = [], {}
    for number, (name, (architecture, quantize, top)) in enumerate(request.param.items()):
        model = room / f"model-{architecture}"
        if not model.exists():
            save_model(make_model(architecture, torch.bfloat16), model)
        outputs[name] = (room / f"{number}-one", room / f"{number}-two")
        recipes.append([_recipe(model, quantize, top, output) for output in outputs[name]])
    fails = _recipe(room / "model-llama", UNREACHABLE, {}, room / "failed")
    (room / "recipes.json").write_text(json.dumps([two for _, two in recipes]))
    (room / "fails.yaml").write_text(json.dumps(fails))
    begun = Recipe.model_validate(recipes[0][1])
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(1, patch, lambda: run(begun, progress=False))
        script = Path(__file__).with_name("run_recipes.py")
        process = launched([str(script), str(room / "recipes.json"), str(room / "fails.yaml")])
        try:
            # What one of them measures, the other must not find.
            patch.setattr(cache, "cache_directory", lambda: room / "cache")
            for one, _ in recipes:
                run(Recipe.model_validate(one), progress=False)
            _, errors = process.communicate()
        finally:
            process.terminate()
    return Both(outputs, room / "failed", process.returncode, errors)


@pytest.mark.slow
def test_two_processes_leave_the_bytes_that_one_leaves(both: Both) -> None:
    for one, two in both.outputs.values():
        assert two.exists(), both.errors
        assert _result(one) == _result(two)
        assert not list(two.rglob("activations-*"))


@pytest.mark.slow
def test_an_error_ends_all_processes_with_one_sentence(both: Both) -> None:
    assert both.status != 0
    (sentence,) = _said(both.errors)
    assert "guard.max_layer_error 0.0001" in sentence
    assert sorted(path.name for path in both.failed.iterdir()) == ["journal"]


def test_each_process_has_whole_batches_and_together_they_have_all() -> None:
    tokens = torch.arange(100)[:, None].expand(-1, 300)
    for count in (1, 2, 3, 40):
        shares = [Processes(rank=rank, count=count).share(tokens) for rank in range(count)]
        assert torch.equal(torch.cat(shares), tokens)
        assert all(len(share) % (2048 // 300) == 0 for share in shares[:-1])


def test_memory_is_planned_for_what_each_does(recipe: Callable[..., Recipe]) -> None:
    """Only one of them restores the whole model at the end, for its zero-points: most of what a small model takes."""
    calibrate = {"samples": 2, "length": 32}
    settings = {"scheme": "W4A16_ASYM", "group_size": 64, "rounding": "nearest"}
    made = recipe("builtin:smelt-6m", {"calibrate": calibrate, "evaluate": False}, **settings)
    one, two, many = (Plan.make(made, processes=count) for count in (1, 2, 8))
    assert one.model is not None
    each = one.prepared[0].cost(windows=2, length=32).memory
    assert each < whole_model_bytes(one.model)
    assert one.cost.memory < two.cost.memory < 2 * one.cost.memory
    assert many.cost.memory > 8 * each


@pytest.mark.parametrize(("rounding", "collects"), [("signround", True), ("gptq", False)])
def test_disk_is_planned_for_what_the_first_collects(
    rounding: str, collects: bool, recipe: Callable[..., Recipe]
) -> None:
    """The inputs of a block and what it gave unrounded, of all windows, once more."""
    wanted = recipe("builtin:smelt-6m", group_size=64, rounding=rounding)
    alone, two = (Plan.make(wanted, processes=count).cost.disk for count in (1, 2))
    tokens, width = wanted.calibrate.samples * wanted.calibrate.length, 256
    each = compute_dtype(torch.bfloat16).itemsize
    assert two - alone == (2 * tokens * width * each if collects else 0)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["interrupt", "kill the first", "kill the second"])
def test_what_ends_one_process_ends_all_and_the_same_command_continues(
    what: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model, out = tiny("llama", torch.bfloat16, num_hidden_layers=8), tmp_path / "out"
    quantize = {"scheme": "W4A16", "group_size": 32, "rounding": "gptq"}
    recipe = _recipe(model, quantize, {}, out)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["-m", "smelt.compress", "run", str(tmp_path / "recipe.yaml")]
    # As a shell starts what is in its foreground: in a group of its own, which an interrupt reaches as a whole.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = launched(command, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    while process.poll() is None and not (out / "journal/step-0/block-00000.safetensors").exists():
        time.sleep(0.001)
    if what == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    else:
        rank = "0" if what == "kill the first" else "1"
        (one,) = (child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == rank)
        one.kill()
    _, errors = process.communicate()
    assert process.returncode != 0
    (sentence,) = _said(errors)
    assert "the same command continues where this one stopped" in sentence
    assert not (out / "checkpoint").exists()
    again = launched(command)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    run(Recipe.model_validate({**recipe, "output": str(tmp_path / "quiet")}), progress=False)
    assert _result(out) == _result(tmp_path / "quiet")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "interrupt", "kill the second", "kill the second before they meet"])
def test_the_command_starts_the_others_itself(what: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, out = tiny("llama", torch.bfloat16, num_hidden_layers=8), tmp_path / "out"
    recipe = _recipe(model, {"scheme": "W4A16", "group_size": 32, "rounding": "gptq"}, {}, out)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "smelt.compress", "run", str(tmp_path / "recipe.yaml"), "--processes", "2"]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    options: dict[str, Any] = {"env": {**os.environ, **threads}, "stderr": subprocess.PIPE, "text": True}
    if what != "nothing":
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, start_new_session=True, **options)
        signal.signal(signal.SIGINT, before)
        while not (children := psutil.Process(process.pid).children()):
            time.sleep(0.001)
        (other,) = children
        begins = "before" in what
        while not begins and process.poll() is None and not (out / "journal/step-0/block-00000.safetensors").exists():
            time.sleep(0.001)
        if what == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            other.kill()
        _, errors = process.communicate()
        assert process.returncode != 0
        (sentence,) = _said(errors)
        assert "the same command continues where this one stopped" in sentence
        assert not other.is_running()
        assert not (out / "checkpoint").exists()
    again = subprocess.Popen(command, **options)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    run(Recipe.model_validate({**recipe, "output": str(tmp_path / "quiet")}), progress=False)
    assert _result(out) == _result(tmp_path / "quiet")


def test_a_launched_command_starts_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(SmeltError, match="--processes starts processes, but a launcher has started this one"),
        on_processes(2),
    ):
        pass


@pytest.mark.slow
def test_processes_that_see_different_models_end_with_an_error(tiny: Callable[..., Path], tmp_path: Path) -> None:
    quantize = {"scheme": "W4A16", "group_size": 32}
    for rank, seed in enumerate((0, 1)):
        recipe = _recipe(tiny(seed=seed), quantize, {}, tmp_path / "out")
        (tmp_path / f"recipe-{rank}.yaml").write_text(json.dumps(recipe))
    shell = f"exec {sys.executable} -m smelt.compress run {tmp_path}/recipe-$RANK.yaml"
    process = launched(["--no-python", "sh", "-c", shell])
    _, errors = process.communicate()
    assert process.returncode != 0
    (sentence,) = _said(errors)
    assert "process 1 has a recipe, model or version other than process 0's" in sentence
