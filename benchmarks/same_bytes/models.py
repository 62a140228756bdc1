"""The models that the recipes are run on: random ones of several architectures, and an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .digests import digest

SMELT_6M = "builtin:smelt-6m"
_TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_MIXTURE: dict[str, Any] = _TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Random models by name: the architecture, its changes of the usual configuration, and the type of its weights.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", _TINY, "bfloat16"),
    "wide": (
        "llama",
        _TINY | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512},
        "float32",
    ),
    "mixture": ("qwen3_moe", _MIXTURE, "bfloat16"),
    "opt": ("opt", _TINY | {"ffn_dim": 256, "word_embed_proj_dim": 128}, "float32"),
    "gemma": ("gemma2", _TINY | {"sliding_window": 16, "query_pre_attn_scalar": 32}, "bfloat16"),
    "neox": ("gpt_neox", _TINY, "float32"),
    "gpt2": ("gpt2", _TINY | {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512}, "float32"),
}


def make_model(directory: Path) -> None:
    """Write the random model that the directory is named after, from a seed that its name gives."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    architecture, settings, dtype = MODELS[directory.name]
    torch.manual_seed(int(digest(directory.name), 16))
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    # Several files, as large models have them.
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="400KB")
    _tokenizer().save_pretrained(directory)


def _tokenizer() -> Any:
    """Of bytes: each is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<pad>")


def make_adapter(directory: Path) -> None:
    """Write a LoRA adapter on two linears of each of smelt-6m's blocks, as peft saves them."""
    import torch
    from safetensors.torch import save_file

    rank, blocks, shapes = 4, 6, {"self_attn.q_proj": (256, 256), "mlp.down_proj": (256, 768)}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for block in range(blocks):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{block}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.05
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.05
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": SMELT_6M,
        "r": rank,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in shapes],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
