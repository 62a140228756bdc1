"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..requests.sequence import Sequence, TokenLogprobs
from .bad_words import completing
from .draw import Draw, DrawTokens
from .logit_statistics import LogitStatistics

_SEED_STEP = 1_000_003


@dataclass(frozen=True)
class Sampled:
    """A chosen token.

    Attributes:
        token: its id.
        logprob: its log probability under the model, before any change.
        top: the most likely tokens' too, if requested; always includes the chosen one.
        is_allowed: false where no token was, and this is any.
    """

    token: int
    logprob: float
    top: TokenLogprobs | None
    is_allowed: bool = True


def sample(
    logits: Tensor,
    stats: LogitStatistics,
    rows: list[int],
    sequences: list[Sequence],
    ends: frozenset[int],
    seed: int,
    draw_tokens: DrawTokens,
) -> list[Sampled]:
    """Choose the next token of each sequence.

    Args:
        logits: float32 ``[rows, vocabulary]`` on the CPU.
        stats: their statistics.
        rows: the row of each sequence.
        sequences: the sequences to sample for.
        ends: the model's end tokens.
        seed: of the engine, for requests without one.
        draw_tokens: draws them.
    """
    asked = [i for i, sequence in enumerate(sequences) if not sequence.request.params.is_plainly_greedy]
    ranked = draw_tokens([draw_for(logits[rows[i]], sequences[i], ends, seed) for i in asked]) if asked else []
    chosen = {i: tokens[0].token if tokens else None for i, tokens in zip(asked, ranked, strict=True)}
    found: list[Sampled] = []
    for i, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        params, total = sequence.request.params, stats.total[row]
        token, logit = chosen.get(i, stats.best[row]), stats.highest[row]
        is_allowed = token is not None
        token = token if token is not None else 0
        if i in chosen:
            logit = logits[row, token].item()
        top = None if params.logprobs is None else top_logprobs(logits[row], total, token, params.logprobs)
        found.append(Sampled(token, logit - total, top, is_allowed))
    return found


def draw_for(row: Tensor, sequence: Sequence, ends: frozenset[int], seed: int, ranks: int = 1) -> Draw:
    """What to draw a sequence's next token from.

    Args:
        row: of logits, float32 ``[vocabulary]``.
        sequence: with all tokens before it.
        ends: the model's end tokens.
        seed: of the engine, for requests without one.
        ranks: how many tokens to rank.
    """
    params = sequence.request.params
    return Draw(changed_logits(row, sequence, ends), params, sequence_seed(sequence, seed), len(sequence.tokens), ranks)


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
    """A row of logits after biases, penalties, and without tokens that may not follow; the same one if nothing changes it."""
    params = sequence.request.params
    if not params.changes_logits:
        return row
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
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids)
        row = torch.full_like(row, float("-inf")).index_copy_(0, allowed, row[allowed])
    if sequence.matcher is not None:
        sequence.matcher.forbid(row)
    _forbid(row, _unwanted(sequence, ends))
    return row


def _unwanted(sequence: Sequence, ends: frozenset[int]) -> list[int]:
    """Ends that come too soon, and tokens that complete a bad word."""
    request, params = sequence.request, sequence.request.params
    generated = sequence.tokens[len(request.prompt) :] if request.bad_words else []
    found = completing(request.bad_words, generated)
    if len(sequence.tokens) - len(request.prompt) < params.min_tokens:
        found += [*params.stop_token_ids, *(() if params.ignore_eos else ends)]
    return found


def _forbid(row: Tensor, tokens: list[int]) -> None:
    """Make tokens impossible, unless nothing else is possible."""
    if not tokens:
        return
    places = torch.tensor(tokens)
    before = row[places]
    row[places] = float("-inf")
    if not row.isfinite().any():
        row[places] = before


def sequence_seed(sequence: Sequence, seed: int) -> int:
    """The seed of a sequence's noise; ``seed`` is the engine's, for requests without one."""
    request = sequence.request
    own = next((each for each in (request.params.seed, request.seed) if each is not None), seed)
    return (own + _SEED_STEP * sequence.index) % 2**63
