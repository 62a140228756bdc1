"""Embeddings: a prompt's hidden states, pooled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from ..decoder.batch import Batch, Run
from ..decoder.model import Model

Pooling = Literal["last", "mean"]
_BLOCK = 16


def embedding(
    model: Model, tokens: list[int], *, pooling: Pooling, budget: int, adapter: str | None = None
) -> Iterator[Tensor | None]:
    """A prompt's embedding, as a vector of length 1.

    Args:
        model: the decoder.
        tokens: of the prompt.
        pooling: the last token's hidden state, or the mean of all.
        budget: tokens at a time.
        adapter: that changes the model for it; None for none.

    Yields:
        None after each piece but the last, so that other work can go on; then the embedding, in float32 on the CPU.
    """
    blocks = -(-len(tokens) // _BLOCK)
    store = model.keys_values(blocks, _BLOCK, model.dtype)
    total = torch.zeros(model.spec.hidden)
    for start in range(0, len(tokens), budget):
        piece = tokens[start : start + budget]
        is_last = start + len(piece) == len(tokens)
        run = Run(piece, start, list(range(blocks)), len(tokens), len(piece), adapter)
        states = model.head.states(model.hidden(Batch([run], _BLOCK), store)).float().cpu()
        total = states[-1] if pooling == "last" else total + states.sum(0)
        yield torch.nn.functional.normalize(total, dim=0) if is_last else None
