"""Logits of every architecture against transformers', whole and in pieces, alone and side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import SmeltError
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.runtime.decoder.architectures import ARCHITECTURES
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.weights.checkpoint import Checkpoint

from ...tiny import CONFIGS, make_model, save_model, sizes
from ..drive import logits_in_pieces

_ROPE = {"rope_theta": 10000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CONFIGS),
    ("llama", {"rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    (
        "llama",
        {"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    (
        "llama",
        {
            "rope_parameters": {
                **_ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    (
        "phi3",
        {
            "rope_parameters": {
                **_ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(16)],
                "long_factor": [2.0 + 0.3 * i for i in range(16)],
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings": 32,
        },
    ),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16}),
    # Which transformers rotates whole all the same.
    ("llama", {"rope_parameters": {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("phi3", {"rope_parameters": {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "final_logit_softcapping": 4.0},
    ),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"word_embed_proj_dim": 128, "enable_bias": False}),
    ("opt", {"layer_parts": ["attention", "mlp", "all"], "do_layer_norm_before": False}),
    ("llama", {"layer_parts": ["mlp", "all", "attention"]}),
    ("gpt_neox", {"layer_parts": ["all", "mlp", "attention"]}),
    ("mixtral", {"layer_parts": ["attention", "none", "mlp"]}),
    (
        "llama",
        {
            "layer_sizes": sizes(
                intermediate_size=(64, 256, 96), num_attention_heads=(4, 2, 4), num_key_value_heads=(2, 1, 2)
            )
        },
    ),
    ("gemma2", {"layer_sizes": sizes(num_attention_heads=(2, 4, 2), num_key_value_heads=(1, 2, 1))}),
    ("qwen3_moe", {**_EXPERTS, "layer_sizes": sizes(moe_intermediate_size=(64, 32, 96))}),
    ("opt", {"layer_sizes": sizes(ffn_dim=(64, 256, 96))}),
    (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "rope_parameters": {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    ("mixtral", {"sliding_window": 12}),
    ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2}),
]


def test_every_architecture_is_tried() -> None:
    assert {name for name, _ in VARIANTS} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24}, 48),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 32),
    ],
)
def test_scaled_positions_reach_as_far_as_they_are_scaled(rope: dict[str, Any], reach: int, tmp_path: Path) -> None:
    """As Qwen's documentation extends its models: the scaling is added, max_position_embeddings stays."""
    model = make_model("llama", max_position_embeddings=32, rope_parameters={**_ROPE, **rope})
    engine = Engine(save_model(model, tmp_path), quiet=True, kv_cache_memory_bytes=1 << 22, dtype="float32")
    assert engine.max_model_len == reach
    prompt = list(range(4, 4 + reach - 8))
    found = engine.generate([prompt], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0))[0]
    whole = torch.tensor([[*prompt, *found.outputs[0].token_ids]])
    if rope["rope_type"] == "yarn":  # transformers' dynamic frequencies change with each token
        with torch.no_grad():
            expected = model(whole).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert found.outputs[0].token_ids == expected.tolist()


def test_dynamic_positions_are_unscaled_unless_longer_outputs_are_asked_for(tmp_path: Path) -> None:
    rope = {**_ROPE, "rope_type": "dynamic", "factor": 4.0}
    model = make_model("llama", max_position_embeddings=32, rope_parameters=rope)
    engine = Engine(save_model(model, tmp_path), quiet=True, kv_cache_memory_bytes=1 << 22, dtype="float32")
    prompt = list(range(4, 20))
    greedy = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    found = engine.generate([prompt], greedy)[0].outputs[0].token_ids
    assert len(prompt) + len(found) == 32
    with torch.no_grad():
        expected = model(torch.tensor([[*prompt, *found[:-1]]])).logits[0, len(prompt) - 1 :].argmax(-1)
    assert found == expected.tolist()
    # Where little is left, or more is asked for, the scaled positions are there.
    longer = [*prompt, *range(20, 31)]
    assert len(engine.generate([longer], greedy)[0].outputs[0].token_ids) == 128 - len(longer)
    least = SamplingParams(max_tokens=None, min_tokens=20, temperature=0)
    assert len(engine.generate([prompt], least)[0].outputs[0].token_ids) >= 20


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "opt"])
def test_a_checkpoint_saved_without_its_head_is_read(architecture: str, tmp_path: Path) -> None:
    """As GPT-2's own is: its names have no prefix."""
    model = make_model(architecture, tie_word_embeddings=True)
    path = save_model(model, tmp_path)
    prefix = f"{model.base_model_prefix}."
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix(prefix): each for name, each in tensors.items()}, path / "model.safetensors")
    prompt = torch.tensor([[5, 9, 11, 40]])
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, repetition_penalty=1.0)
    engine = Engine(path, quiet=True, kv_cache_memory_bytes=1 << 22)
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    assert engine.generate(prompt.tolist(), greedy)[0].outputs[0].token_ids == expected[0, 4:].tolist()


@pytest.mark.few(15)
@pytest.mark.parametrize(
    ("architecture", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
def test_logits_are_those_of_transformers(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(architecture, **changes)
    path = save_model(model, tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 4096, (length,), generator=generator).tolist() for length in (60, 31)]
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    whole = [[(0, 60)], [(1, 31)]]
    pieces = [[(0, 17)], [(1, 20), (0, 9)], [(0, 1), (1, 1)], [(1, 1), (0, 1)], [(0, 31), (1, 1)], [(1, 8), (0, 1)]]
    for steps in (whole, pieces):
        for found, reference in zip(logits_in_pieces(path, prompts, steps), expected, strict=True):
            assert (found - reference).abs().max() <= 1e-4 * max(1.0, reference.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_transformers_does(dtype: torch.dtype, tmp_path: Path) -> None:
    path = save_model(make_model("llama", dtype), tmp_path)
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(4, 4096, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(tokens).logits[0].float()
    found = logits_in_pieces(path, [tokens[0].tolist()], [[(0, 40)]], Operators(dtype))[0]
    assert (found - expected).abs().mean() <= 0.01 * expected.abs().mean()


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path)
    save_model(make_model("llama"), tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(RuntimeProblem, match=r"does not know the architecture 'bert'; it knows gemma2"):
        Model(Checkpoint(tmp_path), Operators(torch.float32))


def test_a_config_that_contradicts_the_tensors_is_named(tmp_path: Path) -> None:
    import json

    path = save_model(make_model("llama"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    sentence = r"self_attn.q_proj.weight: the checkpoint stores \(128, 128\), but config.json implies \(256, 128\)"
    with pytest.raises(SmeltError, match=sentence):
        Model(Checkpoint(path), Operators(torch.float32))
