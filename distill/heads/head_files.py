"""A draft head's checkpoint, as EAGLE-3's authors write it, with the norms of EAGLE-3.1, as vLLM reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...quant.grid import Grid, shared_scale
from ...quant.rounding.nearest import nearest
from ...quant.scheme import Scheme
from ...quant.stored.config import quantization_config
from ...system.storage.files import disk_error, write_text
from ...system.storage.tensor_files import save_tensors
from .head_module import HeadModule, HeadShape

# Those that NVFP4 rounds with one scale, as the runtime multiplies them together.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def scheme_problem(scheme: Scheme, shape: HeadShape) -> str | None:
    """Why a head's weights cannot be rounded to a scheme; None if they can."""
    if scheme.reads_inputs:
        return f"{scheme.name} rounds inputs to a scale that is measured beforehand, which is not done for draft heads; use W4A16"
    for name, parameter in HeadModule.without_weights(shape).named_parameters():
        problem = scheme.shape_problem(*parameter.shape) if parameter.dim() == 2 else None
        if problem is not None:
            return f"{name}: {problem}"
    return None


def write_head(
    directory: Path, module: HeadModule, tokens: Tensor | None, dtype: torch.dtype, scheme: Scheme | None
) -> None:
    """Write a checkpoint.

    Args:
        directory: that gets it; must not exist.
        module: the trained head.
        tokens: which of the model's tokens each of its logits is for; None for all.
        dtype: of what is not rounded.
        scheme: what linears are rounded to; None for none.
    """
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise disk_error(error, directory, 0) from None
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    linears = [name for name, weight in weights.items() if weight.dim() == 2]
    stored: dict[str, Tensor] = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    config = _config(module.shape, dtype)
    if scheme is not None:
        for together in _stacks(linears):
            shared = shared_scale([stored[name] for name in together], scheme.args)
            for name in together:
                weight = stored.pop(name)
                grid = Grid.fit(weight, scheme.args, dtype, shared)
                parts = nearest(weight, scheme.args, grid=grid).stored(scheme)
                stored |= {name.removesuffix("weight") + local: part for local, part in parts.items()}
        named = {name.removesuffix(".weight"): scheme for name in linears}
        config["quantization_config"] = quantization_config(named, [], head=["lm_head"])
    if tokens is not None:
        stored["d2t"] = tokens - torch.arange(len(tokens))
        stored["t2d"] = torch.zeros(module.shape.config.vocab_size, dtype=torch.bool).index_fill(0, tokens, value=True)
    save_tensors(directory / "model.safetensors", stored)
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")


def _states(after: tuple[int, ...]) -> dict[str, Any]:
    """Which states it reads: by the layers that read them, too, for vLLM, and by those that leave them for SGLang."""
    within: dict[str, Any] = {"use_aux_hidden_state": True}
    if min(after) > 0:
        within["eagle_aux_hidden_state_layer_ids"] = [count - 1 for count in after]
    return {"eagle_aux_hidden_state_layer_ids": list(after), "eagle_config": within}


def _stacks(names: list[str]) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        local = name.removesuffix(".weight").rpartition(".")[2]
        key = next((together[0] for together in _TOGETHER if local in together), local)
        found.setdefault(key, []).append(name)
    return list(found.values())


def _config(shape: HeadShape, dtype: torch.dtype) -> dict[str, Any]:
    layer = shape.config.to_diff_dict()
    for name in ("transformers_version", "architectures", "dtype"):
        layer.pop(name, None)
    rope = dict(shape.config.rope_parameters or {})
    # As transformers before its version 5 has them, too.
    older = {"rope_theta": rope.pop("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = rope
    return {
        **layer,
        **older,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": shape.vocabulary,
        "fc_norm": True,
        "norm_output": True,
        **_states(shape.after),
        "dtype": str(dtype).removeprefix("torch."),
    }
