"""A block's attention, as named by configurations and compressed-tensors."""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from torch import nn


def cached_attention(block: nn.Module) -> str | None:
    """compressed-tensors' name of a block's attention, under which scales are stored; None if there is none."""
    return next((name for name, module in block.named_modules() if is_cached_attention_module(module)), None)


def head_width(config: Any) -> int:
    """Channels of an attention head, by a model's configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
