"""A model's hyper-parameters as the fields of a GGUF file."""

from __future__ import annotations

from typing import Any

from ...runtime.decoder.architectures import DecoderSpec
from .gguf_architectures import Architecture, window_period


def fields_of(config: Any, spec: DecoderSpec, architecture: Architecture) -> dict[str, Any]:
    """The fields, without the architecture prefix; those of positions come from gguf_positions."""
    eps = "rms_epsilon" if spec.norm.startswith("rms") else "epsilon"
    found: dict[str, Any] = {
        "vocab_size": spec.vocabulary,
        "context_length": spec.unscaled_length,
        "embedding_length": spec.hidden,
        "block_count": len(spec.layers),
        "feed_forward_length": _feed_forward(config),
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.key_value_heads,
        "attention.key_length": spec.head_size,
        "attention.value_length": spec.head_size,
        f"attention.layer_norm_{eps}": float(spec.eps),
    }
    if spec.score_cap:
        found["attn_logit_softcapping"] = float(spec.score_cap)
    if spec.logit_cap:
        found["final_logit_softcapping"] = float(spec.logit_cap)
    if spec.experts:
        found |= {"expert_count": spec.experts, "expert_used_count": spec.experts_per_token}
        size = getattr(config, "moe_intermediate_size", None)
        if size:
            found["expert_feed_forward_length"] = size
    if architecture.writes_parallel:
        found["use_parallel_residual"] = spec.order == "parallel"
    if architecture.windows:
        found |= _windows(spec, architecture.windows)
    return found


def _feed_forward(config: Any) -> int:
    size = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return size or 4 * config.hidden_size


def _windows(spec: DecoderSpec, every: int) -> dict[str, Any]:
    size = next((layer.window for layer in spec.layers if layer.window is not None), spec.max_length)
    found: dict[str, Any] = {"attention.sliding_window": size}
    period = window_period(spec, every)
    if period not in (None, every):  # what has none is refused
        found["attention.sliding_window_pattern"] = period
    return found
