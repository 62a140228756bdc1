"""Step times of models of given shapes, with any weights: timed alternately on the runtime's kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...system.progress import Log
from ..decoder.model import Model
from ..decoder.parts.batch import Batch, Run
from ..engine.setup.loading import operators_for
from ..weights.live_weights import LiveWeights

_BLOCK = 16
_ROUNDS, _STEPS = 9, 8


@dataclass(frozen=True)
class ModelShape:
    """A model without weights.

    Attributes:
        config: its Hugging Face configuration.
        tensors: the shape of each, by its name in a checkpoint.
    """

    config: Any
    tensors: Mapping[str, tuple[int, ...]]


def decode_seconds(
    shapes: Sequence[ModelShape], dtype: torch.dtype, *, batch: int, context: int, log: Log
) -> list[float]:
    """Seconds of a decode step for every shape: medians of rounds in which the shapes take turns.

    Args:
        shapes: the models; all are in memory at once.
        dtype: their compute dtype.
        batch: the batch size.
        context: the context length, including the new token; at least two.
        log: gets messages for the user.

    Raises:
        RuntimeProblem: the runtime does not support such a model.
    """
    blocks = -(-context // _BLOCK)
    runs = [Run([1], context - 1, list(range(i * blocks, (i + 1) * blocks)), context, wants=1) for i in range(batch)]
    return _in_turns(shapes, dtype, runs, log, steps=_STEPS)


def prompt_seconds(shapes: Sequence[ModelShape], dtype: torch.dtype, *, tokens: int, log: Log) -> list[float]:
    """The same for a prefill step of a prompt, with one token's logits."""
    runs = [Run([1] * tokens, 0, list(range(-(-tokens // _BLOCK))), tokens, wants=1)]
    return _in_turns(shapes, dtype, runs, log, steps=1)


def _in_turns(
    shapes: Sequence[ModelShape], dtype: torch.dtype, runs: list[Run], log: Log, *, steps: int
) -> list[float]:
    operators = operators_for(dtype, torch.device("cpu"), log=log)
    blocks = 1 + max(block for run in runs for block in run.blocks)
    models = [Model(_filled(shape, dtype), operators) for shape in shapes]
    stores = [model.keys_values(blocks, _BLOCK, dtype) for model in models]
    spent: list[list[float]] = [[] for _ in models]
    for turn in range(_ROUNDS + 1):
        for mine, model, store in zip(spent, models, stores, strict=True):
            model(Batch(runs, _BLOCK), store)  # so that the caches hold what they would if it ran alone
            begun = time.perf_counter()
            for _ in range(steps):
                model(Batch(runs, _BLOCK), store)
            if turn:
                mine.append((time.perf_counter() - begun) / steps)
    return [statistics.median(mine) for mine in spent]


def _filled(shape: ModelShape, dtype: torch.dtype) -> LiveWeights:
    """Tensors of small values, each in its own memory."""
    return LiveWeights(
        shape.config, dtype, shape.tensors, lambda name: torch.full(shape.tensors[name], 1e-3, dtype=dtype)
    )
