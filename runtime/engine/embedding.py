"""Embeddings: a prompt's hidden states, pooled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["last", "mean"]


def embedding(pieces: Iterable[Tensor], pooling: Pooling) -> Iterator[Tensor | None]:
    """A prompt's embedding, as a vector of length 1.

    Args:
        pieces: its hidden states ``[1, tokens, width]``.
        pooling: the last token's hidden state, or the mean of all.

    Yields:
        None after each piece, so that other work can go on; then the embedding, in float32 on the CPU.
    """
    total = torch.zeros(1)
    for piece in pieces:
        states = piece[0].float().cpu()
        total = states[-1] if pooling == "last" else total + states.sum(0)
        yield None
    yield torch.nn.functional.normalize(total, dim=0)
