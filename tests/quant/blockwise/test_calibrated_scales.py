"""Scales that calibration fixes: those of inputs, and of cached keys and values, against transformers' own activations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress import Recipe, SmeltError, run
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from ...interruption import interrupt_after

Q_PROJ = "model.layers.0.self_attn.q_proj"


def _quantized(recipe: Recipe) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The checkpoint, its tensors and its quantization_config; the reload check must have gone through transformers."""
    checkpoint = run(recipe, fresh=True).checkpoint
    assert json.loads((checkpoint / "smelt.json").read_text())["reload"]["through"] == "transformers"
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    return checkpoint, load_file(checkpoint / "model.safetensors"), config


@pytest.fixture
def calibration(recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path) -> tuple[Path, Tensor]:
    """A model, and the tokens that every run of ``recipe`` on it calibrates with."""
    path = tiny("llama")
    kept = recipe(path, {"evaluate": False, "output": str(tmp_path / "first")}, diagnostics=8)
    from smelt.compress.pipeline import pipeline

    plan = pipeline.Plan.make(kept)
    assert plan.calibration is not None
    return path, plan.calibration.tokens


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("scheme", "inputs"),
    [("W8A8", "static"), ("W8A8", "static_asymmetric"), ("FP8", None), ("NVFP4", None), ("W4AFP8", "static")],
)
def test_input_scales_are_those_of_what_transformers_computes(
    scheme: str,
    inputs: str | None,
    calibration: tuple[Path, Tensor],
    tiny: Callable[..., Path],
    recipe: Callable[..., Recipe],
) -> None:
    """The first linear reads what no quantized weight has touched, so its range is that of the original model."""
    path, tokens = calibration
    dtype = torch.float32
    if scheme == "NVFP4":
        path, dtype = tiny("llama", torch.bfloat16), torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path)
    seen: list[Tensor] = []
    model.get_submodule(Q_PROJ).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(tokens)
    low, high = min(x.min().item() for x in seen), max(x.max().item() for x in seen)
    _, stored, _ = _quantized(recipe(path, {"evaluate": False}, scheme=scheme, inputs=inputs))
    peak = max(-low, high)
    found = {name.removeprefix(f"{Q_PROJ}."): t for name, t in stored.items() if name.startswith(f"{Q_PROJ}.input")}
    if scheme == "NVFP4":
        assert found["input_global_scale"].item() == pytest.approx(448 * 6 / peak, rel=0.01)
        assert found["input_global_scale"].equal(stored["model.layers.0.self_attn.v_proj.input_global_scale"])
        return
    assert found["input_scale"].shape == (1,)
    assert found["input_scale"].dtype == dtype
    expected = {"static_asymmetric": (high - low) / 255, "static": peak / 127.5}.get(inputs or "", peak / 448)
    if scheme == "W4AFP8":
        expected = peak / 448
    assert found["input_scale"].item() == pytest.approx(expected, rel=1e-4)
    assert ("input_zero_point" in found) is (inputs == "static_asymmetric")
    if inputs == "static_asymmetric":
        assert found["input_zero_point"].item() == round(-128 - low / expected)


def test_weights_of_four_bits_are_packed_though_inputs_are_rounded(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny("llama")
    for scheme in ("W4A8", "W4AFP8", "W4A4"):
        _, stored, config = _quantized(recipe(path, {"evaluate": False}, scheme=scheme, group_size=32))
        assert stored[f"{Q_PROJ}.weight_packed"].shape == (128, 128 // 8)
        assert config["config_groups"]["group_0"]["format"] == "pack-quantized"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kv_cache", "expected"),
    [
        ("fp8", lambda x: x.abs().max().view(1) / 448),
        ("int8", lambda x: x.abs().max().view(1) / 127.5),
        ({"dtype": "int8", "scales": "head"}, lambda x: x.abs().amax((0, 2, 3)).view(-1, 1, 1) / 127.5),
        ({"dtype": "int4", "scales": "head"}, lambda x: x.abs().amax((0, 2, 3)).view(-1, 1, 1) / 7.5),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_cache_scales_are_those_of_transformers_own_cache(
    kv_cache: Any,
    expected: Callable[[Tensor], Tensor],
    calibration: tuple[Path, Tensor],
    recipe: Callable[..., Recipe],
) -> None:
    """With no linear quantized, the first layer's cache is the original's; keys are taken after they are rotated."""
    path, tokens = calibration
    cache = DynamicCache()
    with torch.no_grad():
        AutoModelForCausalLM.from_pretrained(path)(tokens, past_key_values=cache, use_cache=True)
    _, stored, config = _quantized(recipe(path, {"evaluate": False}, ignore=["Linear"], kv_cache=kv_cache))
    assert config["config_groups"] == {}
    for name, tensor in (("k_scale", cache.layers[0].keys), ("v_scale", cache.layers[0].values)):
        found = stored[f"model.layers.0.self_attn.{name}"]
        torch.testing.assert_close(found, expected(tensor), rtol=1e-4, atol=0)


def test_int4_keys_and_values_get_a_scale_for_each_token(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    _, stored, config = _quantized(recipe(tiny("llama"), {"evaluate": False}, kv_cache="int4", group_size=32))
    scheme = config["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["dynamic"], scheme["group_size"]) == (4, True, 32)
    assert not any(name.endswith("k_scale") for name in stored)


@pytest.mark.slow
def test_a_killed_run_with_a_rounded_cache_continues_with_the_same_bytes(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later blocks read what rounded keys and values produce, also after an interruption."""
    made = recipe(tiny("llama"), {"evaluate": False}, scheme="W8A8", inputs="static", kv_cache="fp8", rounding="gptq")
    quiet = {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()}
    interrupt_after(2, monkeypatch, lambda: run(made, fresh=True))
    assert {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()} == quiet


def test_an_architecture_without_a_known_cache_is_a_problem(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(
        SmeltError, match="has no attention with a cache that compressed-tensors knows; remove the field"
    ):
        run(recipe(tiny("gpt_neox"), kv_cache="fp8"))
    with pytest.raises(SmeltError, match=r"kv_cache: config\.json has no num_key_value_heads"):
        run(recipe(tiny("opt"), kv_cache="fp8"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"scheme": "W4A16", "inputs": "static"}, "has no 8-bit inputs"),
        ({"scheme": "FP8_DYNAMIC", "inputs": "static_asymmetric"}, "has no zero-points"),
        ({"scheme": "NVFP4", "inputs": "dynamic"}, "has no 8-bit inputs"),
        ({"overrides": [{"targets": ["re:.*"], "inputs": "static"}]}, "group_size and inputs need a scheme"),
    ],
)
def test_inputs_that_a_scheme_does_not_have_are_refused(
    settings: dict[str, Any], sentence: str, recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(ValueError, match=sentence):
        recipe("builtin:smelt-6m", **settings)
