"""transformers with Smelt's reader: every stored format becomes the weights that it means, experts' and inputs included."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, SmeltError, config_for, run
from smelt.compress.export import export
from smelt.quant.scheme_names import SUPPORTED
from smelt.runtime.weights.checkpoint import Checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from ...runtime.drive import logits_in_pieces
from ...tiny import from_transformers
from ..coded import Coded, compressed

PROMPT = torch.randint(4, 4096, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", SUPPORTED)
def test_a_model_is_what_transformers_makes_of_it_itself(scheme: str, tiny: Callable[..., Path]) -> None:
    path = compressed(tiny("llama", torch.bfloat16, num_hidden_layers=2), scheme)
    ours = AutoModelForCausalLM.from_pretrained(path, config=config_for(path))
    theirs = from_transformers(path)
    with torch.no_grad():
        expected, found = theirs(PROMPT).logits, ours(PROMPT).logits
    assert ours.dtype == torch.bfloat16
    for name, module in theirs.named_modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(ours.get_submodule(name).weight, module.weight), name
    assert torch.equal(found, expected), "inputs are rounded, too, where the scheme says so"


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "NVFP4A16", "FP8_BLOCK", "W8A8"])
def test_experts_of_any_scheme(architecture: str, scheme: str, tiny: Callable[..., Path]) -> None:
    path = compressed(tiny(architecture, torch.bfloat16, num_hidden_layers=2), scheme)
    model = AutoModelForCausalLM.from_pretrained(path, config=config_for(path))
    stored = Checkpoint(path)
    place, names = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }[architecture]
    for layer in range(2):
        fused = model.model.layers[layer].mlp.experts
        for expert in range(4):
            gate, up, down = (
                stored.matrix(f"model.layers.{layer}.{place}.experts.{expert}.{name}").dense(torch.bfloat16)
                for name in names
            )
            assert torch.equal(fused.gate_up_proj[expert], torch.cat([gate, up]))
            assert torch.equal(fused.down_proj[expert], down)
    assert torch.equal(
        model.model.layers[1].self_attn.q_proj.weight,
        stored.matrix("model.layers.1.self_attn.q_proj").dense(torch.bfloat16),
    )


@pytest.mark.parametrize("to", ["gptq", "gptq-v2", "awq"])
def test_gptq_and_awq_without_their_packages(to: str, coded: Callable[..., Coded], tmp_path: Path) -> None:
    changed = {"model.layers.1.mlp.down_proj": {"plain": True}}
    if to != "awq":
        changed["model.layers.0.mlp.down_proj"] = {"bits": 8, "group": -1}
    source = coded(changed, symmetric=False)
    export(str(source.path), to, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=config_for(tmp_path / "out"))
    for name, meant in source.meant.items():
        assert torch.equal(model.get_submodule(name).weight, torch.from_numpy(meant).half()), name


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "mixtral"])
def test_what_is_saved_is_plain(architecture: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny(architecture, torch.bfloat16, num_hidden_layers=1), "W4A16_ASYM")
    model = AutoModelForCausalLM.from_pretrained(path, config=config_for(path))
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    with torch.no_grad():
        assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)


def test_what_it_cannot_load_is_said(tiny: Callable[..., Path]) -> None:
    with pytest.raises(SmeltError, match="its weights are not quantized; transformers loads them"):
        config_for("builtin:smelt-6m")
    path = compressed(tiny("llama", torch.bfloat16, num_hidden_layers=1), "W4A16")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SmeltError, match=re.escape(str(path)) + ".*'bitsandbytes' is not supported"):
        config_for(path)


@pytest.mark.parametrize(
    "beside",
    [
        {"kv_cache": "fp8"},
        {"overrides": [{"targets": ["re:.*mlp.*"], "scheme": "FP8"}]},
        {"overrides": [{"targets": ["re:.*mlp.*"], "scheme": "W8A16"}]},
        {"overrides": [{"targets": ["re:.*mlp.*"], "scheme": "W4A16", "group_size": 32}]},
    ],
    ids=["keys and values", "rounded inputs", "other weights", "as many bits without them"],
)
def test_zero_points_beside_what_transformers_alone_does_not_load_with_them(
    beside: dict[str, Any], tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    asked = recipe(tiny("llama"), {"evaluate": False}, scheme="W4A16_ASYM", group_size=32, rounding="nearest", **beside)
    made = run(asked, progress=False).checkpoint
    assert 'from_pretrained("PATH", config=config_for("PATH"))' in (made / "README.md").read_text()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(made, config=config_for(made), dtype=torch.float32)
        expected = model(PROMPT).logits[0]
    found = logits_in_pieces(made, [PROMPT[0].tolist()], [[(0, PROMPT.shape[1])]])[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
