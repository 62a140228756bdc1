"""Pruning mixtures whose blocks are not all alike: a dense one first, experts that are shared, attention through a latent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.pipeline.plan import Plan
from transformers import AutoModelForCausalLM

from ...tiny import CONFIGS, make_model, save_model

DEEPSEEK: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.setitem(CONFIGS, "deepseek_v3", DEEPSEEK)
    return lambda **changes: save_model(make_model("deepseek_v3", **changes), tmp_path / "model")


def _recipe(model: Path, output: Path, *steps: dict[str, Any]) -> Recipe:
    data = {
        "model": str(model),
        "output": str(output),
        "calibrate": {"samples": 8, "length": 64},
        "evaluate": False,
        "steps": [{"prune": step} for step in steps],
    }
    return Recipe.model_validate(data)


def _problems(model: Path, output: Path, step: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in Plan.make(_recipe(model, output, step)).problems]


def test_channels_that_are_shared_twice_are_refused_and_not_half_pruned(
    deepseek: Callable[..., Path], tmp_path: Path
) -> None:
    model = deepseek(n_shared_experts=2)
    (problem,) = _problems(model, tmp_path / "out", {"structure": "ffn", "ratio": 0.25})
    assert problem.startswith("steps.0.prune.structure: DeepseekV3ForCausalLM")
    assert _problems(model, tmp_path / "out", {"structure": "mlp", "count": 1})


@torch.no_grad()
def test_heads_through_a_latent_are_pruned_whole(deepseek: Callable[..., Path], tmp_path: Path) -> None:
    model = deepseek(n_shared_experts=1)
    checkpoint = run(_recipe(model, tmp_path / "out", {"structure": "heads", "ratio": 0.5})).checkpoint
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["num_attention_heads"] == 2
    assert AutoModelForCausalLM.from_pretrained(checkpoint)(TOKENS).logits.isfinite().all()


@pytest.mark.slow
def test_a_search_counts_blocks_that_differ(deepseek: Callable[..., Path], tmp_path: Path) -> None:
    step = {"structure": "auto", "target": {"params": 0.8}}
    model = deepseek(n_shared_experts=1)
    checkpoint = run(_recipe(model, tmp_path / "out", step)).checkpoint
    before, after = (
        sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters()) for path in (model, checkpoint)
    )
    assert after <= 0.8 * before


def test_a_search_on_what_lost_parts_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [{"structure": "attention", "count": 1}, {"structure": "auto", "target": {"params": 0.8}}]
    (problem,) = Plan.make(_recipe(tiny(), tmp_path / "out", *steps)).problems
    assert "parts of some of its blocks were already removed" in str(problem)


def test_blocks_never_leave_a_model_without_attention(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", num_hidden_layers=4)
    steps = [{"structure": "attention", "count": 2}, {"structure": "blocks", "count": 2, "score": "loss"}]
    checkpoint = run(_recipe(model, tmp_path / "out", *steps)).checkpoint
    assert "all" in json.loads((checkpoint / "config.json").read_text())["layer_parts"]
