"""Limits on what a layer may lose, experts that no token reaches, and channels that deserve a look."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, run
from smelt.quant.channels import channel_notes
from smelt.quant.layer_stats import StatsCollector
from smelt.quant.scheme import resolve
from transformers import AutoModelForCausalLM

from ...interruption import interrupt_after


def test_a_layer_beyond_the_limit_ends_the_run_if_asked_for(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    guard = {"max_layer_error": 0.01, "otherwise": "fail"}
    made = recipe(tiny("llama"), {"evaluate": False}, group_size=32, guard=guard)
    with pytest.raises(SmeltError, match=r"_proj: its outputs change by .*more than guard.max_layer_error 0.01"):
        run(made)
    assert not (Path(made.output) / "checkpoint").exists()


def test_a_layer_beyond_the_limit_is_a_warning_by_default(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    result = run(recipe(tiny("llama"), {"evaluate": False}, group_size=32, guard={"max_layer_error": 0.05}))
    text = "\n".join(result.report.candidates[0].warnings)
    assert "more than max_layer_error 0.05" in text


def test_failing_layers_fall_back_to_more_bits_with_all_that_share_their_input(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W2 fails the limit everywhere but where inputs are few; what is stored says what was done, also after a kill."""
    path = tiny("llama", torch.bfloat16)
    overrides = [{"targets": ["re:.*layers.1.mlp.*"], "scheme": "W2A16", "group_size": 32}]
    guard = {"max_layer_error": 0.25, "otherwise": "fallback", "fallback": "W8A16"}
    made = recipe(path, {"evaluate": False}, scheme="W4A16", group_size=32, overrides=overrides, guard=guard)
    result = run(made)
    layers = {layer.name: layer for layer in result.report.candidates[0].layers}
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert layers[f"model.layers.1.mlp.{name}"].scheme == "W8A16 g128"
        assert layers[f"model.layers.1.mlp.{name}"].error < 0.02
    assert layers["model.layers.0.mlp.up_proj"].scheme == "W4A16 g32"
    assert json.loads((result.checkpoint / "smelt.json").read_text())["reload"]["through"] == "transformers"
    quiet = {p.name: p.read_bytes() for p in result.checkpoint.iterdir()}
    interrupt_after(2, monkeypatch, lambda: run(made, fresh=True))
    assert {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()} == quiet


def test_a_fallback_that_does_not_fit_the_shapes_is_found_before_any_work(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    guard = {"max_layer_error": 0.1, "otherwise": "fallback", "fallback": "W4A16"}
    path = tiny("llama", intermediate_size=160)
    with pytest.raises(SmeltError, match=r"guard.fallback: model.layers.0.mlp.down_proj and 2 more: its 160 input"):
        run(recipe(path, group_size=32, guard=guard))


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{"rounding": "nearest", "diagnostics": 8}, {"rounding": "gptq"}])
def test_experts_that_no_token_reaches_are_calibrated_on_all_and_reported(
    settings: dict[str, Any], tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny("qwen3_moe", num_experts_per_tok=1)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):  # the sum of a token's channels or its negative wins, never 0
            tensors[name].zero_()
            tensors[name][0], tensors[name][3] = 1, -1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    result = run(recipe(path, {"evaluate": False}, group_size=32, **settings))
    warnings = [w for w in result.report.candidates[0].warnings if "calibrated on all of them" in w]
    assert any("none of 256 calibration tokens reached this expert" in w for w in warnings)
    assert not any("rounded to nearest instead" in w for w in result.report.candidates[0].warnings)
    unreached = {w.split(":")[0] for w in warnings}
    layers = {layer.name: layer for layer in result.report.candidates[0].layers}
    assert all(layers[name].error is not None for name in unreached)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(result.checkpoint)(torch.arange(20)[None]).logits
    assert torch.isfinite(logits).all()


def test_dead_and_exploding_channels_are_reported() -> None:
    inputs = torch.randn(500, 64)
    inputs[:, [3, 9]] = 0
    inputs[:, 7] *= 1000
    collector = StatsCollector(64, 500, hessian=False)
    collector.add(inputs)
    stats = collector.result()
    weights_only = channel_notes(stats, resolve("W4A16"))
    assert weights_only == ["2 of its 64 input channels are zero on all of the calibration text"]
    (_, exploding) = channel_notes(stats, resolve("W8A8"))
    assert exploding.startswith("input channel 7 reaches ")
    assert channel_notes(StatsCollector(64, 500, hessian=False).result(), resolve("W8A8")) == []
