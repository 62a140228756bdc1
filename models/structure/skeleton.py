"""A model without weights: its modules on the meta device, its parts, and its checkpoint's names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from ...system.errors import SmeltError
from ..checkpoint.stored_shapes import StoredShape
from ..checkpoint.weights import Weights
from ..directory.agreement import match_names, parameters_of
from ..directory.directory import ModelDirectory
from ..directory.empty_model import empty_model, find_blocks


@dataclass
class Skeleton:
    """A causal LM's modules, with parameters on the meta device and computed buffers real.

    Attributes:
        model: the transformers model.
        blocks_name: the name of the list of decoder blocks, such as ``model.layers``.
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
        # What routers return, for a loss in training, a model looks for in its blocks, which are not there.
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
        model, fused = empty_model(config, dtype, trust_remote_code=trust_remote_code)
        model.eval().requires_grad_(False)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        names = {id(module): name for name, module in model.named_modules()}
        if head is None or embedding is None:
            raise SmeltError(f"{type(model).__name__}: Smelt cannot find its output head or input embedding")
        tied = head.weight is embedding.weight
        _compute_buffers(model)
        return cls(model, find_blocks(model, config), names[id(head)], names[id(embedding)], tied, fused)

    @classmethod
    def of(cls, directory: ModelDirectory) -> Skeleton:
        """The modules that a directory's configuration describes."""
        return cls.build(directory.config(), torch.float32, trust_remote_code=directory.trust_remote_code)

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.blocks_name)
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between blocks."""
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
        return parameters_of(self.model, self.head_name if self.tied else None)

    def checkpoint_names(self, weights: Weights) -> dict[str, str]:
        """The name in ``weights`` of each parameter here.

        Raises:
            SmeltError: one line for each tensor that does not fit.
        """
        infos = {name: weights.info(name) for name in weights.names()}
        stored = {name: StoredShape(info.shape, not info.dtype.is_floating_point) for name, info in infos.items()}
        return match_names(self.model, self.parameters(), stored)


def _compute_buffers(model: nn.Module) -> None:
    """Give buffers that no checkpoint stores (rotary frequencies, embedding scales) their values."""
    for module in model.modules():
        computed = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        if not computed:
            continue
        for name in computed:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
        model._init_weights(module)  # type: ignore[operator]
