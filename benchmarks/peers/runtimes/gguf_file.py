"""A Llama checkpoint as a GGUF file in bfloat16, which llama.cpp's own quantizer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .peer import PeerError, PeerSettings


def write_gguf(settings: PeerSettings, target: Path) -> None:
    """Write the checkpoint without a tokenizer."""
    import gguf
    import torch
    from safetensors import safe_open

    config = settings.config()
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for shard in sorted(settings.model.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors file is no dict
                tensor = tensors.get_tensor(key)
                if "q_proj" in key or "k_proj" in key:
                    tensor = _interleaved(tensor, heads if "q_proj" in key else kv_heads)
                name = names.get_name(key, try_suffixes=(".weight",))
                if name is None:
                    raise PeerError(f"The tensor {key} has no name in GGUF's Llama architecture.")
                if tensor.ndim == 1:
                    writer.add_tensor(name, tensor.float().numpy())
                else:
                    raw = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
                    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Any, heads: int) -> Any:
    """The rows of a query or key projection in llama.cpp's rotary layout."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or config
    return float(parameters.get("rope_theta", 10000.0))
