"""Steps that need no text read none, and leave what they would leave with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress import Recipe, run
from smelt.compress.pipeline.plan import Plan
from smelt.quant.blockwise import quantize_weights
from smelt.system.errors import SmeltError

from ...tiny import from_transformers

GROUPS = {"group_size": 32}


def _checkpoint(path: Path) -> dict[str, bytes]:
    """Every file but those with layers' errors."""
    return {f.name: f.read_bytes() for f in sorted(path.iterdir()) if f.name not in ("smelt.json", "README.md")}


@pytest.mark.parametrize(
    ("quantize", "asks"),
    [
        ({}, []),
        ({"rounding": "hqq"}, []),
        ({"scheme": "FP8_DYNAMIC", "transforms": ["rotate", "equalize"]}, []),
        ({"kv_cache": "int4", "embeddings": "int8", "ignore": []}, []),
        ({"rounding": "gptq"}, ["rounding gptq"]),
        ({"rounding": {"method": "nearest", "scale_search": True}}, ["rounding nearest"]),
        ({"overrides": [{"targets": ["re:.*down_proj"], "rounding": "signround"}]}, ["rounding signround"]),
        ({"transforms": ["equalize", "clip"]}, ["transform clip"]),
        ({"transforms": [{"method": "rotate", "learn": 2}]}, ["transform rotate"]),
        ({"transforms": ["awq"], "rounding": "hqq"}, ["transform awq"]),
        ({"scheme": "W8A8", "inputs": "static"}, ["W8A8 static's fixed input scales"]),
        ({"scheme": "NVFP4"}, ["NVFP4's fixed input scales"]),
        ({"kv_cache": "fp8"}, ["kv_cache's fixed scales"]),
        ({"guard": {"max_layer_error": 0.5}}, ["guard"]),
        ({"diagnostics": 2}, ["diagnostics"]),
        ({"scheme": "auto", "target": {"bits": 4}}, ["scheme auto"]),
    ],
)
def test_each_part_of_a_step_says_whether_it_asks_for_text(
    quantize: dict[str, Any], asks: list[str], tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    settings = {"group_size": 32} | quantize if quantize.get("scheme", "W4A16") == "W4A16" else quantize
    plan = Plan.make(recipe(tiny("llama", torch.bfloat16), **settings))
    assert not plan.problems
    assert plan.text == ({0: asks} if asks else {})
    said = plan.terminal()
    assert all(what in said for what in asks) if asks else "no calibration text is needed" in said


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"scheme": "W4A16", **GROUPS, "ignore": [], "embeddings": "int8"}),
    ("llama", {"scheme": "W4A16_ASYM", **GROUPS}),
    ("llama", {"scheme": "W8A8", "transforms": ["rotate"]}),
    ("llama", {"scheme": "FP8_BLOCK"}),
    ("llama", {"scheme": "NVFP4A16"}),
    ("phi3", {"scheme": "W3A16", **GROUPS, "overrides": [{"targets": ["re:.*down_proj"], "scheme": "W8A16"}]}),
    ("gemma2", {"scheme": "W4A16", **GROUPS, "transforms": ["equalize"]}),
    ("mixtral", {"scheme": "MXFP4A16"}),
    ("qwen3_moe", {"scheme": "W4A16", **GROUPS, "transforms": ["equalize"], "rounding": "hqq"}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("architecture", "quantize"), CASES)
def test_without_text_the_bytes_are_those_of_blocks_that_are_run(
    architecture: str,
    quantize: dict[str, Any],
    tiny: Callable[..., Path],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantize_weights, "_AT_ONCE", 1)  # so that each weight is rounded in several parts
    model, found = tiny(architecture, torch.bfloat16), []
    for name, more in (("alone", {}), ("run", {"diagnostics": 2})):
        top = {"evaluate": False, "output": str(tmp_path / name)}
        result = run(recipe(model, top, **quantize, **more))
        found.append(_checkpoint(result.checkpoint))
        kinds = {layer.error_of for layer in result.report.models[1].layers}
        assert kinds == ({"outputs"} if more else {"weights"})
    assert found[0] == found[1]


def test_a_model_without_a_tokenizer_is_rounded_and_its_errors_are_those_of_the_weights(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    model = tiny("llama", torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    result = run(recipe(model, {"evaluate": False}, **GROUPS))
    before, after = load_file(model / "model.safetensors"), from_transformers(result.checkpoint, dtype=torch.bfloat16)
    after(input_ids=torch.zeros(1, 2, dtype=torch.long))  # which restores what it keeps packed
    layers = {layer.name: layer.error for layer in result.report.models[1].layers}
    assert len(layers) == 21
    for name, error in layers.items():
        weight = before[f"{name}.weight"].double()
        restored = after.get_submodule(name).weight
        assert isinstance(restored, torch.Tensor)
        assert error == pytest.approx(float((weight - restored.double()).norm() / weight.norm()), rel=1e-4)
    assert json.loads((result.checkpoint / "smelt.json").read_text())["data"] is None
    assert "weight error is |W - Q| / |W|" in (result.checkpoint.parent / "report.md").read_text()
    assert "|X(W" not in (result.checkpoint.parent / "report.md").read_text()
    assert "weight error is |W − Q| / |W|" in (result.checkpoint.parent / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_killed_between_blocks_and_continued(
    parts: int,
    tiny: Callable[..., Path],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=5)
    quiet = run(recipe(model, {"evaluate": False, "output": str(tmp_path / "quiet")}, **GROUPS))
    again = recipe(model, {"evaluate": False}, **GROUPS)
    (tmp_path / "recipe.yaml").write_text(json.dumps(again.model_dump(mode="json", exclude_unset=True)))
    script = f"""
import os, sys
from smelt.compress import Recipe, run
from smelt.quant.blockwise import quantize_weights as step
save, saved = step.save_part, []
def kill(*args):
    save(*args)
    saved.append(args[0])
    if len(saved) == {parts}:
        os.kill(os.getpid(), 9)
step.save_part = kill
run(Recipe.load(sys.argv[1]))
"""
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "recipe.yaml")], check=False)
    assert killed.returncode == -signal.SIGKILL
    saved: list[Path] = []
    save = quantize_weights.save_part

    def note(path: Path, *rest: Any) -> None:
        saved.append(path)
        save(path, *rest)

    monkeypatch.setattr(quantize_weights, "save_part", note)
    continued = run(Recipe.load(tmp_path / "recipe.yaml"))
    assert len(saved) == 5 - parts
    for name in ("model.safetensors", "smelt.json", "config.json"):
        assert (continued.checkpoint / name).read_bytes() == (quiet.checkpoint / name).read_bytes()


def test_a_length_that_nobody_chose_fits_the_model(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    model = tiny("llama", torch.bfloat16)  # of 128 positions
    usual = {"model": str(model), "output": str(tmp_path / "out"), "steps": [{"quantize": {"scheme": "W8A8"}}]}
    gptq = [{"quantize": {"scheme": "W8A8", "rounding": "gptq"}}]
    plan = Plan.make(Recipe.model_validate(usual | {"steps": gptq, "calibrate": {"samples": 2}}))
    assert not plan.problems
    assert plan.calibration is not None
    assert plan.calibration.tokens.shape == (2, 128)
    assert plan.recipe.evaluate
    assert plan.recipe.evaluate.length == 128
    for section in ("calibrate", "evaluate"):
        problems = Plan.make(Recipe.model_validate(usual | {section: {"length": 256}})).problems
        assert [str(problem) for problem in problems] == [
            f"{section}.length: 256 tokens exceed {_called(section, model)}; use at most 128"
        ]


def _called(section: str, model: Path) -> str:
    return "the model's context length" if section == "calibrate" else f"the context length of {model}"


def test_more_windows_for_diagnostics_than_there_are_is_a_mistake(tiny: Callable[..., Path], tmp_path: Path) -> None:
    data = {
        "model": str(tiny()),
        "output": str(tmp_path / "out"),
        "calibrate": {"samples": 4},
        "steps": [{"quantize": {"scheme": "W8A8", "diagnostics": 8}}],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(data))
    with pytest.raises(SmeltError, match=r"diagnostics asks for 8 windows, but calibrate\.samples is 4"):
        Recipe.load(tmp_path / "recipe.yaml")


def test_weights_pruned_by_magnitude_read_no_text(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", torch.bfloat16)
    (model / "tokenizer.json").unlink()
    data = {
        "model": str(model),
        "output": str(tmp_path / "out"),
        "evaluate": False,
        "steps": [{"prune": {"structure": "2:4", "score": "magnitude"}}],
    }
    result = run(Recipe.model_validate(data))
    before, after = load_file(model / "model.safetensors"), load_file(result.checkpoint / "model.safetensors")
    errors = {layer.name: layer.error for layer in result.report.models[1].layers}
    assert len(errors) == 21
    assert {layer.error_of for layer in result.report.models[1].layers} == {"weights"}
    for name, error in errors.items():
        weight, left = before[f"{name}.weight"].float(), after[f"{name}.weight"].float()
        groups, stays = weight.abs().unflatten(1, (-1, 4)), left.unflatten(1, (-1, 4)) != 0
        assert torch.equal(left, torch.where(left != 0, weight, 0.0))
        assert (stays.sum(-1) == 2).all()
        assert (torch.where(stays, groups, torch.inf).amin(-1) >= torch.where(stays, 0.0, groups).amax(-1)).all()
        assert error == pytest.approx(float((weight - left).norm() / weight.norm()), rel=1e-3)


@pytest.mark.parametrize(
    ("prune", "asks"),
    [
        ({"structure": "2:4", "score": "magnitude"}, []),
        ({"structure": "2:4"}, ["score wanda"]),
        ({"structure": "2:4", "score": "magnitude", "update": "sparsegpt"}, ["update sparsegpt"]),
        ({"structure": "weights", "sparsity": 0.5, "score": "magnitude", "guard": {"max_layer_error": 1}}, ["guard"]),
        ({"structure": "blocks", "keep": [0, 2]}, []),
        ({"structure": "blocks", "count": 1}, ["score influence"]),
    ],
)
def test_pruning_says_whether_it_asks_for_text(
    prune: dict[str, Any], asks: list[str], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    data = {"model": str(tiny()), "output": str(tmp_path / "out"), "steps": [{"prune": prune}]}
    plan = Plan.make(Recipe.model_validate(data))
    assert not plan.problems
    assert plan.text == ({0: asks} if asks else {})
