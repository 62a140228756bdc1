"""Embeddings and heads in fewer bits: transformers loads them, and the runtime computes what it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, config_for, inspect, run
from smelt.compress.export import export
from transformers import AutoModelForCausalLM

from ...runtime.drive import logits_in_pieces
from ...tiny import from_transformers, make_model, save_model

PROMPT = torch.randint(4, 4096, (32,), generator=torch.Generator().manual_seed(0)).tolist()


def _same_logits(checkpoint: Path) -> None:
    model = from_transformers(checkpoint, experts_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    found = logits_in_pieces(checkpoint, [PROMPT], [[(0, 32)]])[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.few(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "opt", "mixtral"])
def test_an_8_bit_embedding_and_a_4_bit_head(
    architecture: str, tied: bool, recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    model = make_model(architecture, tie_word_embeddings=tied)
    source = save_model(model, tmp_path / "model")
    asked = recipe(source, {"evaluate": False}, group_size=32, rounding="nearest", ignore=[], embeddings="int8")
    made = run(asked, progress=False)
    candidate = made.report.candidates[0]
    assert candidate.reload is not None
    assert candidate.reload["largest_difference"] == 0
    assert not json.loads((made.checkpoint / "config.json").read_text())["tie_word_embeddings"]
    stored = load_file(made.checkpoint / "model.safetensors")
    name = next(name for name in stored if name.endswith("embed_tokens.weight"))
    table = model.get_input_embeddings().weight.detach().double().numpy()  # type: ignore[union-attr]
    scale = stored[name + "_scale"].double().numpy()
    assert stored[name].dtype == torch.int8
    assert stored["lm_head.weight_packed"].dtype == torch.int32
    assert np.abs(scale * stored[name].double().numpy() - table).max(1, keepdims=True).max() <= scale.max() * 0.51
    (layer,) = (layer for layer in candidate.layers if layer.name.endswith("embed_tokens"))
    assert layer.scheme == "W8 by token"
    assert layer.error is not None
    assert (
        0.003 < layer.error < 0.02
    )  # a step of 1/127 of the largest of 128 normal numbers, over the square root of 12
    _same_logits(made.checkpoint)


def test_a_tied_head_is_quantized_apart_from_the_embedding(recipe: Callable[..., Recipe]) -> None:
    made = run(recipe("builtin:smelt-6m", {"evaluate": False}, group_size=64, ignore=[]), progress=False)
    stored = load_file(made.checkpoint / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert "lm_head.weight_packed" in stored
    assert any(layer.name == "lm_head" for layer in made.report.candidates[0].layers)
    _same_logits(made.checkpoint)


def test_a_tied_head_cannot_stay_as_it_is_beside_a_rounded_embedding(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(SmeltError, match=r"embeddings: lm_head is tied .*; quantize it too \(remove lm_head from ign"):
        run(recipe("builtin:smelt-6m", group_size=64, embeddings="int8"))


def test_blocks_are_calibrated_on_the_rounded_embedding(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The same linears as of a model whose embedding was rounded before."""
    source = save_model(make_model("llama", tie_word_embeddings=False), tmp_path / "model")
    settings = {"group_size": 32, "rounding": "gptq"}
    made = run(recipe(source, {"evaluate": False}, embeddings="int8", **settings), progress=False)
    labels = {group.name: group.scheme for group in inspect(str(made.checkpoint)).groups}
    assert labels["model.embed_tokens.weight"] == "int W8A16 channel"
    assert labels["model.layers.*.mlp.down_proj.weight"] == "int W4A16 g32"
    assert "vllm serve" not in (made.checkpoint / "README.md").read_text()
    stored = load_file(made.checkpoint / "model.safetensors")
    changed = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    changed[name] = stored[name].float() * stored[name + "_scale"]
    save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
    again = run(recipe(source, {"evaluate": False, "output": str(tmp_path / "again")}, **settings), progress=False)
    expected = load_file(again.checkpoint / "model.safetensors")
    packed = [name for name in expected if name.endswith("weight_packed")]
    assert packed
    assert all(torch.equal(stored[name], expected[name]) for name in packed)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_runtime_reads_packed_embeddings(tied: bool, tmp_path: Path) -> None:
    """As llm-compressor writes them for vLLM: by class, in groups. transformers loads their restored twin."""
    path = save_model(make_model("llama", tie_word_embeddings=tied), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    rows, columns = tensors["model.embed_tokens.weight"].shape
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, columns // 32, generator=generator) * 0.01 + 0.01
    meant = codes.float() * scale.repeat_interleave(32, 1)
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in path.glob("*.json"):
        (plain / file.name).write_text(file.read_text())
    save_file(tensors | {"model.embed_tokens.weight": meant}, plain / "model.safetensors", metadata={"format": "pt"})
    del tensors["model.embed_tokens.weight"]
    tensors |= {
        "model.embed_tokens.weight_packed": pack_to_int32(codes, 4),
        "model.embed_tokens.weight_scale": scale,
        "model.embed_tokens.weight_shape": torch.tensor([rows, columns]),
    }
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**weights, "num_bits": 8}},
            "group_1": {"targets": ["Embedding"], "weights": weights},
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(plain)(torch.tensor([PROMPT])).logits[0]
        taught = AutoModelForCausalLM.from_pretrained(path, config=config_for(path))(torch.tensor([PROMPT])).logits[0]
    found = logits_in_pieces(path, [PROMPT], [[(0, 32)]])[0]
    for logits in (found, taught):
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.few(1)
@pytest.mark.parametrize("to", ["dense", "gptq", "awq"])
def test_exports_restore_the_embedding(to: str, recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    source = save_model(make_model("llama", tie_word_embeddings=False), tmp_path / "model")
    asked = recipe(source, {"evaluate": False}, group_size=32, rounding="nearest", embeddings="int8")
    made = run(asked, progress=False).checkpoint
    export(str(made), to, tmp_path / "exported")
    codes = load_file(made / "model.safetensors")
    found = load_file(tmp_path / "exported" / "model.safetensors")["model.embed_tokens.weight"]
    expected = codes["model.embed_tokens.weight"].float() * codes["model.embed_tokens.weight_scale"]
    assert torch.equal(found.float(), expected.to(found.dtype).float())


def test_gguf_carries_the_embeddings_codes_over(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    source = save_model(make_model("llama", torch.float16, tie_word_embeddings=False), tmp_path / "model")
    asked = recipe(source, {"evaluate": False}, group_size=32, rounding="nearest", embeddings="int8")
    made = run(asked, progress=False).checkpoint
    export(str(made), "gguf", tmp_path / "model.gguf")
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}["token_embd.weight"]
    codes = load_file(made / "model.safetensors")
    expected = codes["model.embed_tokens.weight"].float() * codes["model.embed_tokens.weight_scale"].float()
    assert found.tensor_type.name == "Q8_0"
    assert np.array_equal(gguf.dequantize(found.data, found.tensor_type), expected.numpy())


@pytest.mark.slow
def test_a_target_counts_what_the_embedding_saves(recipe: Callable[..., Recipe]) -> None:
    """Within the same bytes the linears get more bits, and the file keeps to the target."""
    sizes = {}
    for embeddings in (None, "int8"):
        asked = recipe(
            "builtin:smelt-6m",
            {"evaluate": False},
            scheme="auto",
            target={"bytes": 5_600_000},
            candidates=[{"scheme": "W4A16", "group_size": 64}, {"scheme": "W8A16", "group_size": 64}],
            ignore=[],
            rounding="nearest",
            **({} if embeddings is None else {"embeddings": embeddings}),
        )
        made = run(asked, fresh=True, progress=False)
        assert (made.checkpoint / "model.safetensors").stat().st_size <= 5_600_000
        layers = [layer.scheme for layer in made.report.candidates[0].layers if "proj" in layer.name]
        sizes[embeddings] = layers.count("W8A16 g64")
    assert sizes["int8"] > sizes[None]


def test_an_embedding_alone(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    source = save_model(make_model("llama", tie_word_embeddings=False), tmp_path / "model")
    made = run(recipe(source, {"evaluate": False}, ignore=["Linear"], embeddings="int8"), progress=False)
    config = json.loads((made.checkpoint / "config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["model.embed_tokens"]]
    _same_logits(made.checkpoint)
