"""Checks of the values in ``config.json``, before anything is built or computed from them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

# The minimum and maximum of each, by all the names that families use. The maxima are far beyond any model, and small
# enough that nothing allocated from a single value fills the memory.
_LAYERS, _WIDTH, _HEADS, _EXPERTS, _TOKENS, _POSITIONS = (
    (1, 10_000), (1, 1 << 20), (1, 1 << 14), (0, 1 << 14), (1, 1 << 26), (1, 1 << 31),
)  # fmt: skip
_COUNTS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step"), _EXPERTS),
    "vocab_size": _TOKENS,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "sliding_window"), _POSITIONS),
}
# Above zero and finite; an epsilon is below one besides.
_POSITIVE = ("rope_theta", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_COMPUTED = ("float32", "bfloat16", "float16", "float64")


def raw_problem(data: Mapping[str, Any]) -> str | None:
    """What is wrong with a ``config.json``, as a sentence; None if nothing can be found without building its model."""
    for name, (least, most) in _COUNTS.items():
        value = data.get(name)
        if name == "sliding_window" and value == 0 and data.get("use_sliding_window") is False:
            continue  # as transformers writes Qwen2-MoE's
        if value is not None and not (type(value) is int and least <= value <= most):
            return f"{name} is {_shown(value)}; it must be a number from {least} to {most:,}"
    heads, shared = (data.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        return f"num_key_value_heads is {shared}, which does not divide num_attention_heads ({heads})"
    chosen = data.get("num_experts_per_tok")
    for name in ("num_experts", "num_local_experts"):
        count = data.get(name)
        if isinstance(count, int) and isinstance(chosen, int) and count and not 0 < chosen <= count:
            return f"num_experts_per_tok is {chosen}, but {name} is {count}"
    for name in (*_POSITIVE, *_EPSILONS):
        value = data.get(name)
        most = 1.0 if name in _EPSILONS else math.inf
        if value is not None and not (_is_number(value) and 0 < value < most):
            return f"{name} is {_shown(value)}; it must be above 0{' and below 1' if name in _EPSILONS else ''}"
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if not is_token_id(data.get(name)):
            return f"{name} is {_shown(data[name])}; it must be a token id or a list of token ids"
    for name in _ACTIVATIONS:
        if data.get(name) is not None and not isinstance(data[name], str):
            return f"{name} is {_shown(data[name])}; it must be the name of an activation"
    if not isinstance(data.get("model_type"), str):
        return f"model_type is {_shown(data.get('model_type'))}; it must be the name of an architecture"
    names = data.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return f"architectures is {_shown(names)}; it must be a list of names"
    if data.get("quantization_config") is not None:
        return _quantization_problem(data["quantization_config"])
    return None


def _quantization_problem(quantization: Any) -> str | None:
    """What is wrong with the shape of a ``quantization_config``; what its values mean is for those who read the weights."""
    if not isinstance(quantization, dict) or not isinstance(quantization.get("quant_method", ""), str):
        return f"quantization_config is {_shown(quantization)}; it must be an object with a quant_method"
    groups = quantization.get("config_groups")
    if groups is None:
        return None
    if not isinstance(groups, dict):
        return f"quantization_config's config_groups is {_shown(groups)}; it must be an object of groups"
    for name, group in groups.items():
        where = f"quantization_config's group {_shown(name)}"
        if isinstance(group, list):  # a scheme by its name, with its targets
            group = {"targets": group}
        if not isinstance(group, dict):
            return f"{where} is {_shown(group)}; it must be an object with targets and weights"
        targets = group.get("targets")
        if targets is not None and not (isinstance(targets, list) and all(isinstance(each, str) for each in targets)):
            return f"{where} has targets {_shown(targets)}; they must be a list of names"
        wrong = next((each for each in targets or () if each.startswith("re:") and not _is_pattern(each[3:])), None)
        if wrong is not None:
            return f"{where} has the target {_shown(wrong)}, which is no regular expression"
        for part in ("weights", "input_activations", "output_activations"):
            args = group.get(part)
            if args is None:
                continue
            if not isinstance(args, dict):
                return f"{where} has {part} {_shown(args)}; it must be an object with num_bits"
            if type(args.get("num_bits")) is not int:
                return f"{where} has {part} with num_bits {_shown(args.get('num_bits'))}; it must be a number of bits"
            if args.get("group_size") is not None and type(args["group_size"]) is not int:
                return f"{where} has {part} with group_size {_shown(args['group_size'])}; it must be a number"
    return None


def config_problem(config: Any) -> str | None:
    """What is wrong with a configuration that transformers accepted, as a sentence."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name in _ACTIVATIONS:
        activation = getattr(config, name, None)
        if activation is not None and activation not in ACT2FN:
            return f"{name} is {_shown(activation)}, which transformers does not know"
    ropes = getattr(config, "rope_parameters", None) or {}
    for each in [ropes, *ropes.values()] if isinstance(ropes, dict) else []:
        if not isinstance(each, dict):
            continue
        kind = each.get("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            return f"rope_type is {_shown(kind)}, which is not one of {known}"
        for name, value in each.items():
            counts = name.endswith(("theta", "factor")) and value is not None and not isinstance(value, list)
            if counts and not (isinstance(value, int | float) and _is_number(value) and value > 0):
                return f"{name} in rope_parameters is {_shown(value)}; it must be above 0"
            if name == "partial_rotary_factor" and isinstance(value, int | float) and value > 1:
                return f"{name} in rope_parameters is {_shown(value)}; it must be at most 1"
    layers, kinds = getattr(config, "num_hidden_layers", None), getattr(config, "layer_types", None)
    if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) != layers:
        return f"layer_types has {len(kinds)} layers, but num_hidden_layers is {layers}"
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in _COMPUTED:
        return f"dtype is {_shown(dtype)}; it must be one of {', '.join(_COMPUTED)}"
    return None


def is_token_id(value: Any) -> bool:
    """Whether it is a token id, a list of token ids, or None."""
    return value is None or all(type(each) is int for each in (value if isinstance(value, list) else [value]))


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
