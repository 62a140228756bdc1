"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..decoder.parts.logit_statistics import LogitStatistics
from ..requests.noise import Noise, TokenNoise
from ..requests.params import SamplingParams
from ..requests.sequence import Sequence, TokenLogprobs

_SEED_STEP = 1_000_003
_NUCLEUS = 256  # of the most likely tokens, so many are looked at first


@dataclass(frozen=True)
class Sampled:
    """A chosen token.

    Attributes:
        token: its id.
        logprob: its log probability under the model, before any change.
        top: the most likely tokens' too, if requested; always includes the chosen one.
    """

    token: int
    logprob: float
    top: TokenLogprobs | None


def sample(
    logits: Tensor, stats: LogitStatistics, rows: list[int], sequences: list[Sequence], ends: frozenset[int], seed: int
) -> list[Sampled]:
    """Choose the next token of each sequence.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        stats: their statistics.
        rows: the row of each sequence.
        sequences: the sequences to sample for.
        ends: the model's end tokens.
        seed: of the engine, for requests without one.
    """
    return [sampled(logits, stats, row, sequence, ends, seed) for row, sequence in zip(rows, sequences, strict=True)]


@contextmanager
def trying(sequence: Sequence) -> Iterator[None]:
    """Within it tokens may be appended to a sequence and accepted by its matcher; afterwards both are as before."""
    count, matcher, certain = len(sequence.tokens), sequence.matcher, sequence.certain
    if matcher is not None:
        sequence.matcher = matcher.copy()
    sequence.certain = count if certain is None else certain
    try:
        yield
    finally:
        del sequence.tokens[count:]
        sequence.matcher, sequence.certain = matcher, certain


def sampled(
    logits: Tensor, stats: LogitStatistics, row: int, sequence: Sequence, ends: frozenset[int], seed: int
) -> Sampled:
    """The next token of a sequence, from its row of logits."""
    params = sequence.request.params
    if params.is_plainly_greedy:
        token, logit = stats.best[row], stats.highest[row]
    else:
        token = choose(logits[row], sequence, ends, seed)
        if params.temperature > 0:
            noise_of(sequence, seed).pass_on()
        logit = logits[row, token].item()
    top = None if params.logprobs is None else top_logprobs(logits[row], stats.total[row], token, params.logprobs)
    return Sampled(token, logit - stats.total[row], top)


def top_logprobs(row: Tensor, total: float, token: int, count: int) -> TokenLogprobs:
    """``token``'s log probability and those of the ``count`` most likely tokens, the most likely first.

    Args:
        row: of logits.
        total: the logarithm of the sum of their exponentials.
        token: the chosen one.
        count: how many others.
    """
    best = row.topk(count)
    found = {each: logit - total for each, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
    return found if token in found else {**found, token: row[token].item() - total}


def changed_logits(row: Tensor, sequence: Sequence, ends: frozenset[int]) -> Tensor:
    """A row of logits after biases, forbidden ends, penalties and the constraint."""
    params = sequence.request.params
    row = row.clone()
    if params.logit_bias:
        row[torch.tensor(list(params.logit_bias))] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
    generated = len(sequence.tokens) - len(sequence.request.prompt)
    if params.repetition_penalty != 1:
        with sequence.counted(0) as (tokens, _):
            seen = torch.from_numpy(tokens)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and generated:
        with sequence.counted(len(sequence.request.prompt)) as (tokens, times):
            amount = params.presence_penalty + params.frequency_penalty * torch.from_numpy(times)
            row[torch.from_numpy(tokens)] -= amount
    # A constraint decides by itself when the output ends, and may allow nothing else.
    if generated < params.min_tokens and sequence.matcher is None:
        stops = [*params.stop_token_ids, *(() if params.ignore_eos else ends)]
        row[torch.tensor(stops, dtype=torch.int64)] = float("-inf")
    if sequence.matcher is not None:
        sequence.matcher.forbid(row)
    return row


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


def sequence_seed(sequence: Sequence, seed: int) -> int:
    """The seed of a sequence's noise; ``seed`` is the engine's, for requests without one."""
    request = sequence.request
    own = next((each for each in (request.params.seed, request.seed) if each is not None), seed)
    return (own + _SEED_STEP * sequence.index) % 2**63


def noise_of(sequence: Sequence, seed: int) -> Noise:
    """The noise that a sequence's tokens are chosen with; ``seed`` is the engine's, for requests without one."""
    if sequence.noise is None:
        sequence.noise = TokenNoise(sequence_seed(sequence, seed))
    return sequence.noise


def choose(row: Tensor, sequence: Sequence, ends: frozenset[int], seed: int, ahead: int = 0) -> int:
    """The token that a row of logits gives a sequence: the one of the highest :func:`merits`."""
    params = sequence.request.params
    if params.temperature == 0 or not params.narrows:
        return int(merits(row, sequence, ends, seed, ahead).argmax())
    # Few tokens are left, and only theirs are compared.
    kept = narrowed(changed_logits(row, sequence, ends), params)
    left = kept.isneginf().logical_not_().nonzero()[:, 0]
    noise = noise_of(sequence, seed).of(ahead, len(kept))
    return int(left[(kept[left].softmax(-1) / noise[left]).argmax()])


def merits(row: Tensor, sequence: Sequence, ends: frozenset[int], seed: int, ahead: int = 0) -> Tensor:
    """By token, what a row of logits says for it; the highest is chosen.

    Args:
        row: float32 ``[vocabulary]``.
        sequence: with all tokens before it.
        ends: the model's end tokens.
        seed: of the engine, for requests without one.
        ahead: for which of the tokens that are not chosen yet; 0 for the next one.

    Returns:
        Logits at temperature 0, probabilities over their noise otherwise.
    """
    params = sequence.request.params
    row = changed_logits(row, sequence, ends)
    if params.temperature == 0:
        return row
    shares = narrowed(row, params).softmax(-1)
    # The argmax of probabilities over exponential noise is a sample, and uses the same noise regardless of filtering.
    return shares / noise_of(sequence, seed).of(ahead, len(shares))
