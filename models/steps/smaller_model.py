"""Shared by steps that produce a smaller model: computing with it before it is written, and writing it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...system.progress import Progress
from ...system.storage.tensor_files import SafetensorsFile
from ..checkpoint.writer import Entry, write_checkpoint
from ..streaming.streamed import StreamedModel
from ..structure.open_model import OpenModel
from .block_loop import forward
from .step import RunContext

_TRIED_LENGTH, _TRIED_DIFFERENCE = 16, 1e-3


@torch.no_grad()
def last_hidden(
    model: OpenModel, tokens: Tensor, dtype: torch.dtype, spill: Path, skipped: Collection[int] = ()
) -> Tensor:
    """The last block's outputs for some windows.

    Args:
        model: the model.
        tokens: ``[windows, length]``.
        dtype: what is computed in.
        spill: a directory for activations.
        skipped: blocks to skip.
    """
    streamed = StreamedModel(model.skeleton, model.weights, dtype, spill)
    with forward(streamed, tokens, Progress(False), "") as (store, blocks):
        for index in blocks:
            if index not in skipped:
                with streamed.block(index) as block:
                    streamed.run_block(index, block, store)
        return store.read(slice(None)).clone()


def few_tokens(context: RunContext) -> Tensor:
    """A part of the calibration text long enough to show whether two models compute the same."""
    return context.tokens[:1, :_TRIED_LENGTH]


def computes_the_same(model: OpenModel, other: OpenModel, context: RunContext, order: Tensor | None = None) -> bool:
    """Whether two models compute the same on a few tokens of the calibration text, up to the order of sums.

    Args:
        model: one model.
        other: the other model.
        context: the run.
        order: the hidden channels of ``model`` that correspond to those of ``other``, if in another order.
    """
    wanted, found = (last_hidden(each, few_tokens(context), torch.float32, context.journal) for each in (model, other))
    wanted = wanted if order is None else wanted[..., order]
    return bool((wanted - found).norm() <= _TRIED_DIFFERENCE * wanted.norm())


def write_model(
    after: OpenModel, source: OpenModel, target: Path, changed: Mapping[str, SafetensorsFile] | None = None
) -> None:
    """Write a model directory, with the other files of the one that it was made from.

    Args:
        after: the model.
        source: what it was made from.
        target: the directory.
        changed: files of tensors to be written instead of the model's, by their names.
    """
    entries: list[Entry] = []
    for name in after.weights.names():
        info, home = after.weights.info(name), (changed or {}).get(name, after.weights)
        entries.append((name, info, lambda name=name, info=info, home=home: home.load(name).to(info.dtype)))
    config, trust = after.directory.config_data(), source.directory.trust_remote_code
    write_checkpoint(target, source.directory.path, config, entries, with_code=trust)
