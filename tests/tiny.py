"""Tiny random models of every architecture that Smelt names, saved as Hugging Face directories."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

REPOSITORY = Path(__file__).parents[1]
SMELT_6M = REPOSITORY / "models" / "builtin" / "smelt-6m"
SHARED = REPOSITORY.parent / "shared"

_LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_GEMMA = _LLAMA | {"sliding_window": 16, "query_pre_attn_scalar": 32}
_TIED = {"tie_word_embeddings": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 16},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _TIED,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": _LLAMA,
    "olmo2": _LLAMA,
    "smollm3": _LLAMA,
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt2": {
        "n_embd": 128,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 4096,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _LLAMA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
}


# What closes attention and feed-forward parts, however it is called.
CLOSING = {
    "attention": re.compile(r"(o_proj|out_proj|attention\.dense|attn\.c_proj)(\.weight|\.bias)$"),
    "mlp": re.compile(r"(down_proj|fc2|dense_4h_to_h|mlp\.c_proj|w2)(\.weight|\.bias)?$"),
}


def make_model(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model; its weights are large enough that quantizing them moves the logits."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[architecture](**CONFIGS[architecture] | changes)
    model = _with_sizes(AutoModelForCausalLM.from_config(config), changes, architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    remove_parts(model, changes.get("layer_parts", []))
    return model.to(dtype)


def sizes(**fields: Sequence[int]) -> list[dict[str, int]]:
    """What ``layer_sizes`` of a configuration says, from each field's numbers by block."""
    return [dict(zip(fields, numbers, strict=True)) for numbers in zip(*fields.values(), strict=True)]


def _with_sizes(model: PreTrainedModel, changes: dict[str, Any], architecture: str) -> PreTrainedModel:
    """With each block that of a model whose blocks are all of its size."""
    usual = {name: value for name, value in changes.items() if name != "layer_sizes"}
    for index, each in enumerate(changes.get("layer_sizes", [])):
        even = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**CONFIGS[architecture] | usual | each))
        _blocks(model)[index] = _blocks(even)[index]
    return model.eval()


def _blocks(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


@torch.no_grad()
def remove_parts(model: PreTrainedModel, left: list[str]) -> None:
    """Let blocks of which only ``attention``, ``mlp`` or ``none`` is left add nothing for the other parts."""
    for name, parameter in model.named_parameters():
        numbers = [int(each) for each in name.split(".") if each.isdigit()]
        for part, gone in (("attention", ("mlp", "none")), ("mlp", ("attention", "none"))):
            if numbers and left and CLOSING[part].search(name) and left[numbers[0]] in gone:
                parameter.zero_()


def from_transformers(checkpoint: Path, **options: Any) -> PreTrainedModel:
    """A checkpoint as transformers alone loads it; zero-points it can only restore at once."""
    config = json.loads((checkpoint / "config.json").read_text()).get("quantization_config", {})
    groups = config.get("config_groups", {}).values()
    if "config" not in options and not all(group["weights"]["symmetric"] for group in groups):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(checkpoint, **options)


def save_model(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """Save a model with smelt-6m's tokenizer beside it."""
    model.save_pretrained(directory, **options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SMELT_6M / name, directory / name)
    return directory
