"""A whole model in memory, as student or teacher, loaded from a model directory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...models.causal_attention import StripedAttention
from ...models.directory.directory import ModelDirectory
from ...models.directory.layer_sizes import layer_configs
from ...models.structure.open_model import OpenModel
from ...quant.zeros import not_pruned
from ...system.errors import SmeltError
from ..training.optimizer import Trained
from ..training.split_model import SplitModel


class WholeModel:
    """A model with all its weights, computing in one dtype.

    Args:
        model: the model to load. Its skeleton is filled, so nothing else may use it meanwhile.
        dtype: the compute dtype.
        device: where.

    Attributes:
        split: the model in two halves.
    """

    def __init__(self, model: OpenModel, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._names = {key: name for name, key in model.names.items()}
        self.module: Any = model.skeleton.model
        tensors: dict[str, Tensor] = {}
        for name, key in model.names.items():
            tensor = model.weights.load(key)
            tensors[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        self.module.load_state_dict(tensors, strict=False, assign=True)
        self.module.tie_weights()
        self.module.to(device)  # buffers that are computed and not stored
        self.module.eval().requires_grad_(False)  # no dropout: a teacher's logits must not be noisy
        try:
            self.split = SplitModel(self.module)
        except ValueError as error:
            raise SmeltError(f"{model.directory.path}: {error}, so it cannot be trained") from None

    def trained(self) -> dict[str, Trained]:
        """Every parameter, ready to be trained; weights that were pruned stay zero."""
        found: dict[str, Trained] = {}
        for name in self._model.names:
            parameter = _parameter(self.module, name)
            if parameter is None:
                continue
            parameter.requires_grad_(True)
            matrix = parameter.dim() >= 2
            stays = not_pruned(parameter.detach()) if matrix and name != self._embedding else None
            if not matrix and _closes_nothing(self.module.get_submodule(name.rpartition(".")[0])):
                stays = torch.zeros_like(parameter, dtype=torch.bool)
            found[name] = Trained(parameter, decays=matrix, stays=stays)
        return found

    def checkpoint_activations(self) -> None:
        """Keep only the inputs of blocks for the backward pass, which recomputes the rest."""
        for block in self.blocks:
            # Recomputation runs outside the contexts of the first pass, but must compute attention alike.
            striped = functools.partial(_with_striped_attention, block.forward)
            block.forward = functools.partial(checkpoint, striped, use_reentrant=False)

    @property
    def blocks(self) -> nn.ModuleList:
        """Its decoder blocks."""
        return self._model.skeleton.blocks

    @property
    def in_order(self) -> list[nn.Module]:
        """Modules that run one after another: its blocks, and the embedding if it is not tied to lm_head."""
        embedding = self.module.get_submodule(self._model.skeleton.embedding_name)
        return [*self.blocks, *([] if embedding.weight is self.split.head.weight else [embedding])]

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states between blocks."""
        return self._model.skeleton.hidden_size

    @property
    def heads(self) -> list[int]:
        """Heads of each block's attention."""
        config = self.module.config.get_text_config()
        return [int(each.num_attention_heads) for each in layer_configs(config) or [config] * len(self.blocks)]

    @property
    def vocabulary(self) -> int:
        """Rows of its embedding."""
        return self._model.vocabulary()

    @property
    def context(self) -> int | None:
        """The context length, if known."""
        return self._model.context()

    @property
    def directory(self) -> ModelDirectory:
        """The model directory it was loaded from."""
        return self._model.directory

    @property
    def tensor_names(self) -> list[str]:
        """Names of its tensors in a checkpoint."""
        return list(self._model.names.values())

    def tensor(self, key: str) -> Tensor:
        """A current tensor, by its name in a checkpoint; for a linear that rounds its weight, the rounded one."""
        path, _, leaf = self._names[key].rpartition(".")
        return getattr(self.module.get_submodule(path), leaf)

    @property
    def _embedding(self) -> str:
        return f"{self._model.skeleton.embedding_name}.weight"


def _with_striped_attention(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Entered twice, it would hide attention inputs from modes between the two.
    with nullcontext() if StripedAttention.entered() else StripedAttention():
        return forward(*args, **kwargs)


def _closes_nothing(module: nn.Module) -> bool:
    """Whether a linear is zero, because the part of a block whose output it computes was removed."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() >= 2 and not weight.count_nonzero()


@torch.no_grad()
def begin_anew(model: WholeModel, seed: int) -> None:
    """Give a model random weights, by transformers' initialization of its architecture."""
    module = model.module
    gone = [part for part in module.modules() if _closes_nothing(part)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in module.modules():
            module._init_weights(part)
    for part in gone:
        for parameter in part.parameters(recurse=False):
            parameter.zero_()
    module.tie_weights()


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._parameters.get(leaf)
