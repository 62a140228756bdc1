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
    original: OpenModel, checkpoint: ModelDirectory, scheme: Scheme, dtype: torch.dtype, spill: Path
) -> StreamedModel:
    """Run ``checkpoint`` block by block, its weights restored and its inputs rounded as its scheme says.

    Args:
        original: the model it was made of, whose modules are used.
        checkpoint: where the compressed weights are.
        scheme: how they are compressed.
        dtype: what to compute in.
        spill: a directory for activations that are too large for memory.
    """
    weights = DenseWeights(CheckpointWeights(checkpoint.path), scheme)
    rounded = {}
    if scheme.activations is not None:
        packed = {name for name in original.linears if original.linears[name].key in weights.packed}
        rounded = {name: scheme.activations for name in packed}
    return StreamedModel(original.skeleton, weights, dtype, spill, rounded)
