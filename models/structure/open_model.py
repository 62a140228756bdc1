"""A model that a step works on: what is known before its weights are read, and access to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from ...system.errors import SmeltError
from ..checkpoint.weights import CheckpointWeights, Weights
from ..directory.directory import ModelDirectory
from ..directory.experts import SplitExperts
from .anatomy import Anatomy, study
from .attention import cached_attention
from .skeleton import Skeleton


@dataclass(frozen=True)
class LinearFacts:
    """A linear, before its weight is read.

    Attributes:
        name: its full name in the model.
        key: its weight's name in the checkpoint.
        rows, columns: outputs and inputs.
        kind: its class's name, ``Linear`` or ``Conv1D``.
        dtype: what its weight is stored in.
        is_expert: whether it is part of a routed expert.
    """

    name: str
    key: str
    rows: int
    columns: int
    kind: str
    dtype: torch.dtype
    is_expert: bool

    @property
    def numel(self) -> int:
        return self.rows * self.columns


class OpenModel:
    """A model directory whose configuration, anatomy and tensor shapes have been checked to agree.

    Opening reads headers only; weights are read when a step asks for them. But an lm_head that is stored although it is tied is
    compared with the embedding.

    Args:
        directory: where it is.
        weights: its tensors if they are a transform of those in the directory's files.
        untied_head: whether lm_head is untied although the configuration ties it to the embedding.
        is_edited: whether ``weights`` were edited: they are in float32, and are rounded from that.

    Raises:
        SmeltError: the directory does not hold a model that Smelt can work on.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        weights: Weights | None = None,
        *,
        untied_head: bool = False,
        is_edited: bool = False,
    ) -> None:
        self.directory = directory
        self.is_edited = is_edited
        transformers_logging.set_verbosity_error()
        self.config = directory.config()
        quantization = directory.config_data().get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "an unknown method")
            raise SmeltError(f"{directory.path}: is already quantized ({method}); start from the original model")
        directory.check_generation()
        if untied_head:
            self.config.tie_word_embeddings = False
        self.stored = CheckpointWeights(directory.path)
        self.skeleton = Skeleton.build(self.config, torch.float32, trust_remote_code=directory.trust_remote_code)
        self.weights: Weights = weights or self._without_tied_head()
        self.names = self.skeleton.checkpoint_names(self.weights)
        self.anatomy: Anatomy = study(self.skeleton)

    def _without_tied_head(self) -> Weights:
        """The stored weights; of a tied model without the lm_head that some checkpoints store, too, and that nothing here would change."""
        head, table = f"{self.skeleton.head_name}.weight", f"{self.skeleton.embedding_name}.weight"
        if not (self.skeleton.tied and self.stored.has(head) and self.stored.has(table)):
            return self.stored
        if not self.stored.are_equal(head, table):
            raise SmeltError(
                f"{self.directory.path}: config.json ties lm_head to the embedding, but the checkpoint has another {head}; transformers would"
                " use that: set tie_word_embeddings to false, or remove the tensor"
            )
        return self.stored.without(head)

    @cached_property
    def unknown(self) -> list[str]:
        """What is left unchanged, as Smelt does not understand it, and what is left out, as transformers does not read it."""
        known = set(self.names.values())
        left = [name for name in self.weights.names() if name not in known and len(self.weights.info(name).shape) > 1]
        if not left:
            return list(self.anatomy.unknown)
        which = f"{left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}"
        return [
            *self.anatomy.unknown,
            f"{which}: not read by transformers, and left out (multi-token prediction, as a rule)",
        ]

    @cached_property
    def linears(self) -> dict[str, LinearFacts]:
        """All linears in blocks, then the output head, by name."""
        facts = {name: self._linear(name) for name in self.anatomy.linears()}
        head = self.anatomy.head
        facts[head] = self._linear(head)
        return facts

    @property
    def head(self) -> LinearFacts:
        """The output head."""
        return self.linears[self.anatomy.head]

    @property
    def block_linears(self) -> list[LinearFacts]:
        """All linears in blocks."""
        return [self.linears[name] for name in self.anatomy.linears()]

    @property
    def dtype(self) -> torch.dtype:
        """What the blocks' weights are stored in."""
        return self.block_linears[0].dtype

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return type(self.skeleton.model).__name__

    @property
    def embedding_key(self) -> str:
        """The name of the input embedding's weight in the checkpoint."""
        return self.names[f"{self.skeleton.embedding_name}.weight"]

    @property
    def is_tied(self) -> bool:
        return self.anatomy.tied

    def block_shape(self, index: int) -> object:
        """A key that is equal for blocks of the same structure."""
        block = self.skeleton.blocks[index]
        return tuple(
            (name, type(module), tuple(p.shape for p in module.parameters(recurse=False)))
            for name, module in block.named_modules()
        )

    def attention_prefix(self, index: int) -> str:
        """The prefix of the checkpoint's names of a block's attention, under which its KV cache scales are stored.

        Raises:
            SmeltError: no attention of the block keeps a cache that compressed-tensors knows.
        """
        name = cached_attention(self.skeleton.blocks[index])
        if name is None:
            raise SmeltError(
                f"{type(self.skeleton.blocks[index]).__name__}: has no attention with a cache that compressed-tensors knows"
            )
        start = f"{self.anatomy.blocks[index].name}.{name}."
        label, key = next((label, key) for label, key in self.names.items() if label.startswith(start))
        return key.removesuffix(label.removeprefix(start))

    @cached_property
    def block_numels(self) -> list[int]:
        """By block, the number of elements of its parameters."""
        prefixes = [f"{block.name}." for block in self.anatomy.blocks]
        sizes = {name: math.prod(self.weights.info(key).shape) for name, key in self.names.items()}
        return [sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in prefixes]

    def largest_block(self) -> int:
        """The number of parameters of the largest block."""
        return max(self.block_numels)

    def embedding_bytes(self) -> int:
        """Bytes of the input embedding as stored."""
        return self.weights.info(self.embedding_key).nbytes

    def vocabulary(self) -> int:
        """Rows of the input embedding."""
        return self.weights.info(self.embedding_key).shape[0]

    def context(self) -> int | None:
        """The longest sequence the model was made for, if it says."""
        return getattr(self.config, "max_position_embeddings", None)

    def _linear(self, name: str) -> LinearFacts:
        module: nn.Module = self.skeleton.model.get_submodule(name)
        key_of = self.skeleton.embedding_name if name == self.anatomy.head and self.is_tied else name
        key = self.names.get(f"{key_of}.weight")
        if key is None:
            raise SmeltError(f"{name}: the checkpoint lacks its weight")
        shape = self.weights.info(key).shape
        rows, columns = shape if isinstance(module, nn.Linear) else shape[::-1]
        expert = any(isinstance(self.skeleton.model.get_submodule(parent), SplitExperts) for parent in _parents(name))
        return LinearFacts(name, key, rows, columns, type(module).__name__, self.weights.info(key).dtype, expert)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
