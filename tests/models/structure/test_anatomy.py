"""The anatomy of every architecture, and who feeds whom, by experiment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import SmeltError
from smelt.models.directory.find import find_model
from smelt.models.structure.anatomy import study
from smelt.models.structure.feeders import FeederModule, find_feeders
from smelt.models.structure.open_model import OpenModel
from smelt.models.structure.skeleton import Skeleton
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from ...tiny import CONFIGS

_GATED = {
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "input_layernorm",
    ("self_attn.o_proj",): "self_attn.v_proj",
    ("mlp.gate_proj", "mlp.up_proj"): "post_attention_layernorm",
    ("mlp.down_proj",): "mlp.up_proj",
}
_PRE_FEEDFORWARD = {k: "pre_feedforward_layernorm" if v == "post_attention_layernorm" else v for k, v in _GATED.items()}

# What each block is known to be: groups of linears that share an input, in order, and what feeds them.
EXPECTED: dict[str, dict[tuple[str, ...], str | None]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), _GATED),
    **dict.fromkeys(("gemma2", "gemma3_text"), _PRE_FEEDFORWARD),
    # Norms come after the sublayers, so q/k/v and gate/up read the residual stream itself.
    "olmo2": {k: None if len(k) > 1 else v for k, v in _GATED.items()},
    "phi3": {
        ("self_attn.qkv_proj",): "input_layernorm",
        ("self_attn.o_proj",): "self_attn.qkv_proj",
        ("mlp.gate_up_proj",): "post_attention_layernorm",
        ("mlp.down_proj",): "mlp.gate_up_proj",
    },
    "opt": {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "self_attn_layer_norm",
        ("self_attn.out_proj",): "self_attn.v_proj",
        ("fc1",): "final_layer_norm",
        ("fc2",): "fc1",  # ReLU lets a positive scale through
    },
    "gpt_neox": {
        ("attention.query_key_value",): "input_layernorm",
        ("attention.dense",): "attention.query_key_value",
        ("mlp.dense_h_to_4h",): "post_attention_layernorm",
        ("mlp.dense_4h_to_h",): None,  # GELU does not
    },
    "gpt2": {
        ("attn.c_attn",): "ln_1",
        ("attn.c_proj",): "attn.c_attn",
        ("mlp.c_fc",): "ln_2",
        ("mlp.c_proj",): None,
    },
    **{
        name: {
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "input_layernorm",
            ("self_attn.o_proj",): "self_attn.v_proj",
            **{
                group: feeder
                for i in range(4)
                for group, feeder in (
                    ((f"mlp.experts.{i}.{gate}", f"mlp.experts.{i}.{up}"), "post_attention_layernorm"),
                    ((f"mlp.experts.{i}.{down}",), f"mlp.experts.{i}.{up}"),
                )
            },
        }
        for name, (gate, up, down) in {
            "mixtral": ("w1", "w3", "w2"),
            "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
        }.items()
    },
}


def _skeleton(architecture: str) -> Skeleton:
    return Skeleton.build(CONFIG_MAPPING[architecture](**CONFIGS[architecture]), torch.float32)


def test_every_tiny_architecture_has_an_expectation() -> None:
    assert set(EXPECTED) == set(CONFIGS)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_groups_and_feeders(architecture: str) -> None:
    skeleton = _skeleton(architecture)
    anatomy = study(skeleton)
    assert len(anatomy.blocks) == 3
    assert anatomy.unknown == ()
    for block in anatomy.blocks:
        assert [group.linears for group in block.groups] == list(EXPECTED[architecture])
    feeders = find_feeders(skeleton, anatomy.blocks[1])
    found = {group.linears: feeder and feeder.module for group, feeder in feeders.items()}
    assert found == EXPECTED[architecture]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_phases_come_in_the_order_of_computation(architecture: str) -> None:
    phases = study(_skeleton(architecture)).blocks[0].phases()
    assert len(phases) == 4
    if "experts" in str(EXPECTED[architecture]):
        assert [len(phase) for phase in phases] == [1, 1, 4, 4]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt_neox", "opt", "qwen3"])
def test_a_scale_moved_into_a_feeder_changes_nothing(architecture: str) -> None:
    """What feeders are for: divide input channels of a group by s, multiply the feeder's outputs by s."""
    config = CONFIGS[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**config)).double().eval()
    skeleton = _skeleton(architecture)
    anatomy = study(skeleton).blocks[2]
    tokens = torch.randint(0, 4096, (2, 20))
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        block = model.get_submodule(anatomy.name)
        moved = 0
        for group, feeder in find_feeders(skeleton, anatomy).items():
            if feeder is not None:
                _move_scale(block, group.linears, feeder)
                moved += 1
        after = model(tokens, use_cache=False).logits
    assert moved >= 3
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


def _move_scale(block: nn.Module, linears: tuple[str, ...], feeder: FeederModule) -> None:
    source = block.get_submodule(feeder.module)
    factors = torch.ones(source.weight.shape[0], dtype=torch.float64)
    used = feeder.channels.unique()
    factors[used] = 0.5 + torch.rand(len(used), dtype=torch.float64)
    source.weight.mul_(factors if source.weight.dim() == 1 else factors[:, None])
    if getattr(source, "bias", None) is not None:
        source.bias.mul_(factors)
    for name in linears:
        block.get_submodule(name).weight.div_(factors[feeder.channels])


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_tail_is_its_parts_result(architecture: str, tiny: Callable[..., Path]) -> None:
    """Skipping to a part's last linear must give what the part gives."""
    model = AutoModelForCausalLM.from_pretrained(tiny(architecture)).eval()
    anatomy = study(_skeleton(architecture)).blocks[0]
    if architecture != "gemma2":  # its soft-capped attention hands out the weights too, so nothing is skipped there
        assert any("attn" in tail.part or "attention" in tail.part for tail in anatomy.tails)
    block = model.get_submodule(anatomy.name)
    results: dict[str, torch.Tensor] = {}
    for tail in anatomy.tails:
        for name in (tail.part, tail.linear):
            block.get_submodule(name).register_forward_hook(
                lambda _, args, out, key=f"{tail.part}|{name}": results.__setitem__(
                    key, out[0] if isinstance(out, tuple) else out
                )
            )
    with torch.no_grad():
        model(torch.randint(0, 4096, (2, 16)), use_cache=False)
    for tail in anatomy.tails:
        assert torch.equal(results[f"{tail.part}|{tail.part}"], results[f"{tail.part}|{tail.linear}"])


@pytest.mark.parametrize("architecture", ["falcon", "bloom"])
def test_older_architectures_are_followed_or_refused_with_a_sentence(architecture: str) -> None:
    config = CONFIG_MAPPING[architecture](
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, n_head=4, vocab_size=64
    )
    found = _described_or_unknown(config)
    assert found == "" or "not supported" in found


def test_experts_in_an_unknown_layout_are_named() -> None:
    config = CONFIG_MAPPING["gpt_oss"](
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=64,
        layer_types=["full_attention"] * 2,
    )
    found = _described_or_unknown(config)
    assert "not supported" in found or "experts in an unknown layout" in found


def test_what_is_no_transformer_is_described_or_named() -> None:
    config = CONFIG_MAPPING["mamba"](hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
    found = _described_or_unknown(config)
    assert "not supported" in found or "not a known linear" in found


def _described_or_unknown(config: PretrainedConfig) -> str:
    """Either answer is clear: a refusal, or the names of what is not known."""
    try:
        return "\n".join(study(Skeleton.build(config, torch.float32)).unknown)
    except SmeltError as error:
        return str(error)


def test_weights_that_transformers_does_not_read_are_named(tiny: Callable[..., Path]) -> None:
    """Layers for multi-token prediction are lost by everything that goes through transformers."""
    path = tiny()
    tensors = load_file(path / "model.safetensors")
    more = {"mtp.layers.0.up.weight": torch.ones(4, 8), "mtp.layers.0.down.weight": torch.ones(8, 4)}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    (found,) = OpenModel(find_model(str(path))).unknown
    assert "mtp.layers.0" in found
    assert "and 1 more: not read by transformers" in found
