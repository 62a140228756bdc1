"""Quantizing a model that is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from smelt.compress import Recipe, SmeltError, quantize, run
from smelt.runtime.weights.checkpoint import Checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...tiny import SMELT_6M, make_model

SMALL = {"calibrate": {"samples": 8, "length": 32}, "evaluate": False}


@pytest.mark.slow
def test_the_model_computes_with_what_was_stored(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(SMELT_6M)
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    result = quantize(
        model, tokenizer, scheme="W4A16", rounding="gptq", group_size=64, output=tmp_path / "out", **SMALL
    )
    tokens = torch.randint(0, 4096, (2, 20))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(result.checkpoint)(tokens).logits
        assert torch.equal(model(tokens).logits, expected)
    assert isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)


def test_experts_with_zero_points_are_taken_over(tmp_path: Path) -> None:
    model = make_model("mixtral", torch.bfloat16, num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    done = quantize(model, tokenizer, scheme="W4A16_ASYM", group_size=32, output=tmp_path / "out", **SMALL)
    stored = Checkpoint(done.checkpoint)
    experts = model.model.layers[0].mlp.experts
    down = stored.matrix("model.layers.0.block_sparse_moe.experts.2.w2")
    assert down.zero is not None
    assert torch.equal(experts.down_proj[2], down.dense(torch.bfloat16))
    sentence = (done.report.candidates[0].reload or {})["sentence"]
    assert "config=smelt.compress.config_for(…), which its zero-points need" in sentence
    vllm = next(loader for loader in done.report.candidates[0].loaders if loader.name.startswith("vLLM"))
    assert "quantized experts" in vllm.why


@pytest.mark.slow
def test_it_writes_the_bytes_of_a_recipe_on_the_same_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(SMELT_6M)
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    found = quantize(model, tokenizer, group_size=64, output=tmp_path / "a", **SMALL).checkpoint
    step = {"scheme": "W4A16", "group_size": 64, "rounding": "gptq"}
    recipe = {"model": "builtin:smelt-6m", "output": str(tmp_path / "b"), "steps": [{"quantize": step}], **SMALL}
    expected = run(Recipe.model_validate(recipe)).checkpoint
    from smelt.system.storage.tensor_files import SafetensorsFile

    ours, theirs = (SafetensorsFile(path / "model.safetensors") for path in (found, expected))
    assert set(ours.tensors) == set(theirs.tensors)
    assert all(torch.equal(ours.load(name), theirs.load(name)) for name in ours.tensors)


def test_experts_in_memory(tmp_path: Path) -> None:
    model = make_model("mixtral", torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    before = model.model.layers[0].mlp.experts.down_proj.clone()
    result = quantize(model, tokenizer, scheme="W4A16", group_size=32, output=tmp_path / "out", **SMALL)
    assert not torch.equal(before, model.model.layers[0].mlp.experts.down_proj)
    assert any(".experts." in layer.name for layer in result.report.candidates[0].layers)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scheme": "W5A61"}, "scheme: unknown scheme 'W5A61'"),
        ({"rounding": "gtpq"}, "did you mean gptq"),
        ({"group_size": 48}, "are not divisible by group_size 48"),
        ({"ignore": ["nothing.like.it"]}, "matches no linear"),
        ({"calibrate": {"sample": 3}}, "calibrate.sample"),
    ],
)
def test_mistakes_leave_the_model_alone(options: dict[str, object], expected: str, tmp_path: Path) -> None:
    model = make_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SmeltError, match=expected):
        quantize(
            model,
            AutoTokenizer.from_pretrained(SMELT_6M),
            output=tmp_path / "out",
            **{**SMALL, **options},  # type: ignore[arg-type]
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "out" / "checkpoint").exists()
