"""Logits to tokens, against transformers' processors and the distributions they define."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from smelt.runtime import SamplingParams
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.sampling.draw import Draw, draw_tokens, narrowed
from smelt.runtime.sampling.logit_statistics import logit_statistics
from smelt.runtime.sampling.noise import exponential, exponential_of
from smelt.runtime.sampling.sampling import changed_logits, sample
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY = 200


def sequence_of(prompt: list[int], generated: list[int], **params: Any) -> Sequence:
    request = Request("r", prompt, SamplingParams(**params), 1000)
    return Sequence(request, 0, prompt + generated)


def logits_of(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.6},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 5000},
    ],
    ids=str,
)
def test_narrowing_keeps_what_transformers_keeps(params: dict[str, Any]) -> None:
    asked = SamplingParams(**params)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(asked.temperature))])
    if asked.top_k:
        warpers.append(TopKLogitsWarper(asked.top_k))
    if asked.top_p < 1:
        warpers.append(TopPLogitsWarper(asked.top_p))
    if asked.min_p:
        warpers.append(MinPLogitsWarper(asked.min_p))
    for seed in range(20):
        row = logits_of(seed)
        expected = warpers(torch.zeros(1, 1, dtype=torch.long), row[None].clone())[0]
        torch.testing.assert_close(narrowed(row, asked), expected)


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.999999])
def test_top_p_of_a_large_vocabulary_keeps_what_transformers_keeps(spread: float, top_p: float) -> None:
    """However many tokens that are; but for those at the limit, as sums of so many depend on their order."""
    row = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * spread
    kept = narrowed(row, SamplingParams(top_p=top_p)).isfinite()
    if spread == 0:  # all are as likely as the last one that stays
        assert kept.all()
        return
    expected = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), row[None].clone())[0].isfinite()
    shares = row.double().softmax(-1)
    assert float(shares[kept != expected].sum()) < 1e-5


def test_noise_is_exponential_down_to_the_smallest() -> None:
    """The least of much noise decides which token is chosen."""
    draws = torch.cat([exponential(seed, 9, 1 << 20) for seed in range(32)])
    assert draws.min() > 0
    assert draws.isfinite().all()
    for limit in (1e-6, 1e-4, 1e-2, 1.0, 5.0, 12.0):
        expected = -math.expm1(-limit) * len(draws)
        found = int((draws < limit).sum())
        assert abs(found - expected) < 5 * math.sqrt(expected * math.exp(-limit))


def test_noise_of_some_tokens_is_that_of_all() -> None:
    tokens = torch.tensor([0, 3, 4, 90, 998])
    assert torch.equal(exponential_of(5 << 33 | 2, 7, tokens), exponential(5 << 33 | 2, 7, 999)[tokens])


def test_the_repetition_penalty_is_transformers() -> None:
    sequence = sequence_of([3, 9, 9], [17, 3], repetition_penalty=1.7)
    row = logits_of(0)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([sequence.tokens]), row[None].clone())[0]
    torch.testing.assert_close(changed_logits(row, sequence, frozenset()), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    sequence = sequence_of([3, 9, 9], [17, 3, 17], presence_penalty=0.5, frequency_penalty=0.25)
    row = logits_of(1)
    expected = row.clone()
    expected[17] -= 0.5 + 2 * 0.25
    expected[3] -= 0.5 + 0.25
    torch.testing.assert_close(changed_logits(row, sequence, frozenset()), expected)


def test_ends_are_impossible_before_min_tokens() -> None:
    row = logits_of(2)
    early = sequence_of([1], [5], min_tokens=2, stop_token_ids=(7,), logit_bias={9: 2.0})
    changed = changed_logits(row, early, frozenset({11}))
    assert changed[[7, 11]].tolist() == [float("-inf")] * 2
    assert changed[9] == row[9] + 2
    late = sequence_of([1], [5, 5], min_tokens=2, stop_token_ids=(7,))
    assert torch.equal(changed_logits(row, late, frozenset({11})), row)


def test_samples_follow_the_distribution() -> None:
    row = logits_of(3)
    count = 6000
    sequences = [sequence_of([1], [], temperature=1.3, top_k=12, seed=seed) for seed in range(count)]
    stats = logit_statistics(row[None])
    found = sample(row[None], stats, [0] * count, sequences, frozenset(), 0, draw_tokens)
    shares = torch.bincount(torch.tensor([each.token for each in found]), minlength=VOCABULARY) / count
    expected = narrowed(row, sequences[0].request.params).softmax(-1)
    assert (shares[expected == 0] == 0).all()
    # Five standard errors of each share.
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_a_draw_ranks_what_comes_next() -> None:
    row = logits_of(5)
    row[[3, 8]] = float("-inf")
    greedy = draw_tokens([Draw(row, SamplingParams(temperature=0), 0, 1, 3)])[0]
    best = row.softmax(-1).topk(3)
    assert [each.token for each in greedy] == best.indices.tolist()
    assert [each.odds for each in greedy] == pytest.approx((best.values / best.values[0]).tolist(), rel=1e-5)
    # Among the first six it is a sample of these, and what ranks second is what would be drawn without the first one.
    asked = Draw(row, SamplingParams(top_k=6), 12, 4, 6)
    ranked = [each.token for each in draw_tokens([asked])[0]]
    assert sorted(ranked) == sorted(row.topk(6).indices.tolist())
    for i, token in enumerate(ranked[:-1]):
        row[token] = float("-inf")
        left = asked._replace(logits=row, params=SamplingParams(top_k=5 - i), ranks=1)
        assert draw_tokens([left])[0][0].token == ranked[i + 1]
    nothing = torch.full((VOCABULARY,), float("-inf"))
    assert draw_tokens([asked._replace(logits=nothing), asked._replace(logits=nothing * torch.nan)]) == [[], []]


def test_greedy_takes_the_largest_and_returns_its_probability() -> None:
    rows = torch.stack([logits_of(i) for i in range(4)])
    sequences = [sequence_of([1], [], temperature=0, logprobs=2)] * 4
    found = sample(rows, logit_statistics(rows), [0, 1, 2, 3], sequences, frozenset(), 0, draw_tokens)
    for row, sampled in zip(rows, found, strict=True):
        assert sampled.token == row.argmax()
        assert sampled.logprob == pytest.approx(row.double().log_softmax(-1).max().item(), abs=1e-5)
        assert sampled.top is not None
        assert list(sampled.top) == row.topk(2).indices.tolist()
