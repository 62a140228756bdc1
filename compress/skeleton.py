"""A model without weights: its modules on the meta device, its parts, and its checkpoint's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ..models.layer_sizes import layer_configs
from ..models.weights import Weights
from ..system.errors import Problem, SmeltError, raise_problems
from .experts import unfuse_experts


@dataclass
class Skeleton:
    """A causal LM's modules, with parameters on the meta device and computed buffers real.

    Attributes:
        model: the transformers model.
        blocks_name: where the list of decoder blocks hangs, such as ``model.layers``.
        head_name: the output head's name, such as ``lm_head``.
        embedding_name: the input embedding's name.
        tied: whether the head's weight is the embedding's.
        fused_experts: experts modules whose layout Smelt does not know.
        blocks_return_tuples: whether the model expects its blocks to return a tuple (older architectures do).
    """

    model: nn.Module
    blocks_name: str
    head_name: str
    embedding_name: str
    tied: bool
    fused_experts: list[str]
    blocks_return_tuples: bool = False

    @classmethod
    def build(cls, config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Skeleton:
        """Build the modules that ``config`` describes; parameters take no memory."""
        config.use_cache = False
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
            give_layer_sizes(model)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            ZeroDivisionError,
            RuntimeError,
            AssertionError,
            SmeltError,
        ) as error:
            first = str(error).split("\n")[0]
            raise SmeltError(
                f"config.json: transformers cannot build a {config.model_type} model from it ({first})"
            ) from None
        model.eval().requires_grad_(False)
        fused = unfuse_experts(model)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        names = {id(module): name for name, module in model.named_modules()}
        if head is None or embedding is None:
            raise SmeltError(f"{type(model).__name__}: has no output head or no input embedding that Smelt can find")
        tied = head.weight is embedding.weight
        _compute_buffers(model)
        return cls(model, _find_blocks(model, config), names[id(head)], names[id(embedding)], tied, fused)

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.blocks_name)
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that go from block to block."""
        config = self.model.config
        return int(getattr(config, "hidden_size", None) or self.embedding_width)

    @property
    def embedding_width(self) -> int:
        """Width of the input embedding; OPT's can be narrower than its blocks."""
        embedding = self.model.get_submodule(self.embedding_name)
        assert isinstance(embedding, nn.Embedding)
        return embedding.weight.shape[1]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer by its name here; a tied head's weight is left out."""
        tensors: dict[str, Any] = dict(self.model.state_dict())
        if self.tied:
            tensors.pop(f"{self.head_name}.weight", None)
        return tensors

    def checkpoint_names(self, weights: Weights) -> dict[str, str]:
        """For each parameter here, what ``weights`` calls it.

        Raises:
            SmeltError: one line for each parameter that is missing or has another shape.
        """
        wanted = self.parameters()
        renamings = [c for c in get_model_conversion_mapping(self.model) if isinstance(c, WeightRenaming)]  # type: ignore[arg-type]
        prefix = getattr(self.model, "base_model_prefix", None)
        found: dict[str, str] = {}
        for key in weights.names():
            # Old GPT-2 and GPT-NeoX checkpoints carry masks that transformers no longer has; they match nothing.
            name, _ = rename_source_key(key, renamings, [], prefix, wanted)
            if name in wanted:
                found[name] = key
        problems = [
            Problem(name, "the checkpoint lacks this tensor, which config.json calls for; download the model again")
            for name in wanted
            if name not in found
        ]
        problems += [
            Problem(
                name,
                f"the checkpoint stores {weights.info(key).shape}, but config.json makes it {tuple(wanted[name].shape)}; they belong to different models",
            )
            for name, key in found.items()
            if weights.info(key).shape != tuple(wanted[name].shape)
        ]
        if len(problems) > 8:
            problems = [*problems[:8], Problem("config.json", f"… and {len(problems) - 8} more tensors do not fit")]
        raise_problems(problems)
        return found


def give_layer_sizes(model: nn.Module) -> None:
    """Where layers differ in size, give a model without weights the blocks of models all of whose layers are of that size."""
    config: Any = model.config
    configs = layer_configs(config)
    if configs is None:
        return
    blocks: Any = model.get_submodule(_find_blocks(model, config))
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


def _block_of_size(model: nn.Module, block: nn.Module, config: Any, index: int) -> nn.Module:
    try:
        made = type(block)(config, index)
    except TypeError:  # another way to make its blocks; a whole model takes longer
        even: Any = type(model)._from_config(config, dtype=model.dtype)  # type: ignore[attr-defined]
        made = even.get_submodule(_find_blocks(even, config))[index]
    return made


def _find_blocks(model: nn.Module, config: PretrainedConfig) -> str:
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


def _compute_buffers(model: nn.Module) -> None:
    """Give buffers that no checkpoint stores (rotary frequencies, embedding scales) their values."""
    for module in model.modules():
        computed = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        if not computed:
            continue
        for name in computed:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
        model._init_weights(module)  # type: ignore[operator]
