"""Drawing tokens from rows of logits, in plain torch; the CPU's kernels do the same in fewer passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..requests.params import SamplingParams
from .noise import exponential, exponential_of

_NUCLEUS = 256  # of the most likely tokens, so many are looked at first


class Draw(NamedTuple):
    """A row of logits to choose a token from.

    Attributes:
        logits: float32 ``[vocabulary]`` on the CPU, after biases, penalties and constraints.
        params: whose temperature, top-k, top-p and min-p decide.
        seed: of the sequence's noise.
        length: how many tokens the sequence has; with the seed it fixes the noise.
        ranks: how many tokens to rank: the chosen one, and those that would have come next.
    """

    logits: Tensor
    params: SamplingParams
    seed: int
    length: int
    ranks: int = 1


class RankedToken(NamedTuple):
    """One of the tokens that a draw ranks.

    Attributes:
        token: its id.
        odds: against the first one, whose own are 1: the quotient of their probabilities, each over its noise unless the
            most likely token is taken.
    """

    token: int
    odds: float


DrawTokens = Callable[[Sequence[Draw]], list[list[RankedToken]]]


def draw_tokens(draws: Sequence[Draw]) -> list[list[RankedToken]]:
    """Rank the tokens of each row, the chosen one first; none where logits are not sound or nothing is allowed."""
    return [_drawn(each) for each in draws]


def _drawn(draw: Draw) -> list[RankedToken]:
    row, params = draw.logits, draw.params
    highest = row.max()
    if not math.isfinite(highest):
        return []
    if params.temperature > 0:
        row = narrowed(row - highest, params)  # a small temperature would make large logits infinite
        # The argmax of probabilities over exponential noise is a sample, and uses the same noise regardless of filtering.
        kept = row.isfinite().nonzero()[:, 0]
        if 4 * len(kept) < len(row):  # noise of a whole vocabulary takes longer than a small model's step
            row = row.index_put((kept,), row[kept] - exponential_of(draw.seed, draw.length, kept).log_())
        else:
            row = row - exponential(draw.seed, draw.length, len(row)).log_()
    best = row.topk(min(draw.ranks, len(row)))
    odds = (best.values - best.values[0]).exp_().tolist()
    return [RankedToken(*each) for each in zip(best.indices.tolist(), odds, strict=True) if each[1] > 0]


def narrowed(row: Tensor, params: SamplingParams) -> Tensor:
    """A row of logits divided by the temperature, with filtered tokens at minus infinity: top-k, then top-p, then min-p."""
    row = row / params.temperature
    nothing = float("-inf")
    if 0 < params.top_k < len(row):
        row = row.masked_fill(row < row.topk(params.top_k).values[-1], nothing)
    if params.top_p < 1:
        row = row.masked_fill(row < _lowest_of_nucleus(row, params.top_p), nothing)
    if params.min_p > 0:
        shares = row.softmax(-1)
        row = row.masked_fill(shares < params.min_p * shares.max(), nothing)
    return row


def _lowest_of_nucleus(row: Tensor, top_p: float) -> Tensor:
    """The lowest logit that top-p keeps: those above it have less than ``top_p`` of the probability."""
    total = row.logsumexp(-1)
    # To sort the whole vocabulary takes as long as a small model's step.
    for count in (_NUCLEUS, 16 * _NUCLEUS, len(row)):
        best = row.topk(count).values if count < len(row) else _sorted(row)
        reached = (best - total).exp().cumsum(-1)
        if reached[-1] >= top_p or count >= len(row):
            break
    return best[min(int(torch.searchsorted(reached, top_p)), len(best) - 1)]


def _sorted(row: Tensor) -> Tensor:
    """The highest first; numpy takes a third of torch's time."""
    return torch.from_numpy(np.sort(row.numpy())[::-1].copy())
