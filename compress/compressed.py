"""A compressed checkpoint, seen as the dense model that it stands for."""

from __future__ import annotations

from pathlib import Path

import torch

from ..quant.scheme import Scheme
from .model_directory import ModelDirectory
from .open_model import OpenModel
from .streamed import StreamedModel
from .weights import CheckpointWeights, DenseWeights


def compressed_view(
    original: OpenModel,
    checkpoint: ModelDirectory,
    scheme: Scheme,
    dtype: torch.dtype,
    spill: Path,
    *,
    round_expert_inputs: bool = True,
) -> StreamedModel:
    """Run ``checkpoint`` block by block, its weights restored and its inputs rounded as its scheme says.

    Args:
        original: the model it was made of, whose modules are used.
        checkpoint: where the compressed weights are.
        scheme: how they are compressed.
        dtype: what to compute in.
        spill: a directory for activations that are too large for memory.
        round_expert_inputs: whether experts' inputs are rounded too. Servers do; transformers does not.
    """
    weights = DenseWeights(CheckpointWeights(checkpoint.path), scheme)
    rounded = {}
    if scheme.activations is not None:
        rounded = {
            facts.name: scheme.activations
            for facts in original.linears.values()
            if facts.key in weights.packed and (round_expert_inputs or not facts.is_expert)
        }
    return StreamedModel(original.skeleton, weights, dtype, spill, rounded)
