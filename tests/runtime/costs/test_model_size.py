"""Sizes from configurations, against checkpoints on the disk and published numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.models.checkpoint.weights import CheckpointWeights
from smelt.models.directory.directory import ModelDirectory
from smelt.quant.scheme import resolve
from smelt.runtime import Engine, RuntimeProblem
from smelt.runtime.costs.model_size import model_size
from smelt.system.errors import SmeltError
from transformers import AutoConfig

ARCHITECTURES = ("llama", "qwen3", "gemma2", "mixtral", "gpt2")


def _config(folder: Path, kind: str, **fields: Any) -> ModelDirectory:
    config = AutoConfig.for_model(kind, **fields)
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[kind]]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return ModelDirectory(kind, folder)


def _llama_8b(folder: Path) -> ModelDirectory:
    return _config(
        folder, "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_bytes_are_those_of_the_checkpoint(kind: str, tiny: Callable[..., Path]) -> None:
    path = tiny(kind, dtype=torch.bfloat16)
    assert model_size(ModelDirectory(kind, path)).weight_bytes == CheckpointWeights(path).nbytes


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC"])
def test_bytes_of_a_scheme_are_those_that_a_recipe_writes(
    scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny(dtype=torch.bfloat16)
    options: dict[str, Any] = {"group_size": 32} if scheme == "W4A16" else {}
    made = run(recipe(path, {"evaluate": False}, scheme=scheme, rounding="nearest", **options)).checkpoint
    wanted = model_size(ModelDirectory("plain", path), scheme=resolve(scheme, options.get("group_size")))
    stored = model_size(ModelDirectory("made", made))
    assert stored.weight_bytes == wanted.weight_bytes == CheckpointWeights(made).nbytes
    # A checkpoint does not say what its scheme is called.
    assert [replace(each, scheme="") for each in stored.linears] == [
        replace(each, scheme="") for each in wanted.linears
    ]


def test_a_position_takes_what_the_engine_reserves(tiny: Callable[..., Path]) -> None:
    path = tiny(dtype=torch.bfloat16)
    for kv_cache_dtype in ("auto", "int8"):
        engine = Engine(path, kv_cache_dtype=kv_cache_dtype, max_model_len=64, max_num_seqs=2, quiet=True)
        reserved = engine.reservation.cache / engine.reservation.positions
        assert model_size(ModelDirectory("tiny", path), kv_cache_dtype=kv_cache_dtype).kv_bytes == reserved


def test_llama_3_8b_reads_what_is_published(tmp_path: Path) -> None:
    """15.0 GB a token in bfloat16, 4.65 GB in 4 bits with a bfloat16 head; 128 KiB of keys and values a position."""
    plain = _llama_8b(tmp_path)
    read = {name: model_size(plain, scheme=each) for name, each in (("bf16", None), ("int4", resolve("W4A16", 128)))}
    nbytes = {name: sum(e.nbytes * e.count for e in (*size.linears, size.head)) for name, size in read.items()}
    assert nbytes["bf16"] / 1e9 == pytest.approx(15.0, rel=0.01)
    assert nbytes["int4"] / 1e9 == pytest.approx(4.65, rel=0.01)
    assert read["bf16"].kv_bytes == 128 * 1024
    assert read["bf16"].weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)


@pytest.mark.slow
def test_a_token_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, of which 3.3 are active."""
    size = model_size(
        _config(
            tmp_path, "qwen3_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, head_dim=128,
            num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, vocab_size=151936, tie_word_embeddings=False,
        )
    )  # fmt: skip
    assert size.weight_bytes / 2 == pytest.approx(30.5e9, rel=0.005)
    active = sum(each.numel * each.used for each in (*size.linears, size.head)) + size.vocabulary * size.hidden
    assert active == pytest.approx(3.3e9, rel=0.03)
    experts = [each for each in size.linears if each.experts == 128]
    assert all(each.read(1) == pytest.approx(8 / 128) and each.read(1000) > 0.99 for each in experts)


def test_what_cannot_be_sized_is_said(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    path = tiny(dtype=torch.bfloat16)
    with pytest.raises(SmeltError, match="not divisible by group_size 48"):
        model_size(ModelDirectory("tiny", path), scheme=resolve("W4A16", 48))
    with pytest.raises(RuntimeProblem, match="kv_cache_dtype is 'int5'"):
        model_size(ModelDirectory("tiny", path), kv_cache_dtype="int5")
    made = run(recipe(path, {"evaluate": False}, scheme="W4A16", rounding="nearest", group_size=32)).checkpoint
    with pytest.raises(RuntimeProblem, match="quantized already"):
        model_size(ModelDirectory("made", made), scheme=resolve("W8A8"))
