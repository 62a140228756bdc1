"""The model that a configuration describes, without weights: its parameters are on the meta device and take no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...system.errors import SmeltError, first_line
from .experts import unfuse_experts
from .layer_sizes import layer_configs


def empty_model(
    config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> tuple[Any, list[str]]:
    """Build the modules that ``config`` describes, with separate experts.

    Returns:
        The model, and the names of experts modules whose layout is not known.

    Raises:
        SmeltError: transformers cannot build it.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        give_layer_sizes(model)
        return model, unfuse_experts(model)
    except Exception as error:  # its code computes with the configuration's values
        raise SmeltError(
            f"config.json: transformers cannot build a {config.model_type} model from it ({first_line(error)})"
        ) from None


def give_layer_sizes(model: nn.Module) -> None:
    """Where layers differ in size, replace each block of a model without weights by that of a uniform model of its size."""
    config: Any = model.config
    configs = layer_configs(config)
    if configs is None:
        return
    blocks: Any = model.get_submodule(find_blocks(model, config))
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)  # type: ignore[arg-type]
    try:
        with torch.device("meta"):
            for index, each in enumerate(configs):
                blocks[index] = _block_of_size(model, blocks[index], each, index)
    finally:
        torch.set_default_dtype(before)
    for module in blocks.modules():
        if hasattr(module, "config"):  # what is set in the model's configuration later must reach its blocks
            module.config = config


def find_blocks(model: nn.Module, config: PretrainedConfig) -> str:
    """The name of the list of decoder blocks, such as ``model.layers``.

    Raises:
        SmeltError: there is none.
    """
    depth = getattr(config, "num_hidden_layers", None)
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and len(module) > 0
    ]
    if not lists:
        raise SmeltError(
            f"{type(model).__name__}: Smelt finds no list of {depth} decoder blocks in it; this architecture is not supported"
        )
    return min(lists, key=lambda name: name.count("."))


def _block_of_size(model: nn.Module, block: nn.Module, config: Any, index: int) -> nn.Module:
    try:
        made = type(block)(config, index)
    except TypeError:  # another way to make its blocks; a whole model takes longer
        even: Any = type(model)._from_config(config, dtype=model.dtype)  # type: ignore[attr-defined]
        made = even.get_submodule(find_blocks(even, config))[index]
    return made
