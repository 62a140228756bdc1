"""Compiled draws beside torch's, and beside the distribution that was asked for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from smelt.runtime import SamplingParams
from smelt.runtime.native.operators import NativeOperators
from smelt.runtime.sampling.draw import Draw, DrawTokens, draw_tokens, narrowed
from torch import Tensor

NOTHING = float("-inf")


@pytest.fixture(scope="module")
def native(compiled: ModuleType) -> DrawTokens:
    return NativeOperators(compiled, exact=False).draw_tokens


def logits_of(size: int, seed: int = 0, spread: float = 3) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def rows() -> dict[str, Tensor]:
    found = {
        "random": logits_of(1000),
        "one": torch.tensor([2.0]),
        "few": torch.tensor([2.0, 1.0, NOTHING]),
        "not a multiple of 16": logits_of(67, 1),
        "peaked": torch.cat([torch.tensor([60.0, 59.5]), logits_of(3000, 2)]),
        "nearly flat": logits_of(5000, 3, 0.01),
        "all equal": torch.full((400,), 3.25),
        "two values": torch.tensor([1.0, -1.0]).repeat(150),
        "huge range": torch.cat([logits_of(300), torch.tensor([3e38, -3e38, 1e30, -1e-40])]),
        "mostly impossible": torch.full((600,), NOTHING),
        "coarse": logits_of(650, 4).bfloat16().float(),
        "large": logits_of(50_000, 5, 1),
    }
    found["mostly impossible"][[3, 77, 599]] = torch.tensor([1.0, -20.0, 0.5])
    return found


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.01},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000, "temperature": 2.0},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1e-7},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in rows().items()])
def test_draws_are_torchs(native: DrawTokens, row: Tensor, params: dict[str, Any]) -> None:
    asked = SamplingParams(**params)
    draws = [Draw(row, asked, seed << 33 | 5, 3 + seed % 4) for seed in range(12)]
    found, expected = native(draws), draw_tokens(draws)
    # Rounding may decide between two that are equally good, and whether one more token reaches top-p.
    assert sum(a[0].token != b[0].token for a, b in zip(found, expected, strict=True)) <= (len(row) > 10_000)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in rows().items()])
def test_what_stays_is_what_torch_keeps(native: DrawTokens, row: Tensor, params: dict[str, Any]) -> None:
    """All that stay are ranked, in torch's order and with its odds."""
    asked = Draw(row, SamplingParams(**params), 9, 4, ranks=len(row))
    (found,), (expected,) = native([asked]), draw_tokens([asked])
    odds, wanted = (torch.zeros(len(row), dtype=torch.float64) for _ in range(2))
    for into, ranked in ((odds, found), (wanted, expected)):
        into[[each.token for each in ranked]] = torch.tensor([each.odds for each in ranked], dtype=torch.float64)
        assert ranked[0].odds == 1
        assert [each.odds for each in ranked] == sorted((each.odds for each in ranked), reverse=True)
    if asked.params.temperature > 0:
        # Sums of shares depend on their order in their last digits.
        shares = (row.double() / asked.params.temperature).softmax(-1)
        either = (odds > 1e-30) != (wanted > 1e-30)
        assert shares[either].sum() < 1e-5 * max(1, asked.params.temperature)
        odds, wanted = odds[~either], wanted[~either]
    torch.testing.assert_close(odds, wanted, rtol=2e-4, atol=1e-30)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.7}, {"top_k": 9, "min_p": 0.02}], ids=str)
def test_draws_follow_the_distribution(native: DrawTokens, params: dict[str, Any]) -> None:
    row, asked, count = logits_of(40, 6, 2), SamplingParams(temperature=1.3, **params), 40_000
    drawn = torch.tensor(
        [each[0].token for each in native([Draw(row, asked, i % 200, i // 200) for i in range(count)])]
    )
    expected = narrowed(row.double(), asked).softmax(-1) * count
    found = torch.bincount(drawn, minlength=len(row)).double()
    assert (found[expected == 0] == 0).all()
    kept = expected > 5
    apart = ((found - expected)[kept].square() / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert freedom >= 3
    assert apart < freedom + 4 * (2 * freedom) ** 0.5


def test_of_equals_the_first_is_the_likeliest(native: DrawTokens) -> None:
    row = torch.zeros(100)
    row[[17, 40, 99]] = 1
    ranked = native([Draw(row, SamplingParams(temperature=0), 0, 0, 4)])[0]
    assert [each.token for each in ranked] == [17, 40, 99, 0]
    assert [each.odds for each in ranked[:3]] == [1, 1, 1]


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.5}], ids=str)
def test_nothing_is_drawn_from_unsound_logits(native: DrawTokens, params: dict[str, Any]) -> None:
    bad = [torch.full((70,), NOTHING), logits_of(70), logits_of(70)]
    bad[1][69], bad[2][3] = float("nan"), float("inf")
    sound = logits_of(70)
    found = native([Draw(row, SamplingParams(**params), 1, 1) for row in (*bad, sound)])
    assert [len(each) for each in found] == [0, 0, 0, 1]
    assert native([]) == []


@pytest.mark.parametrize("sizes", [(4096, 100, 4096), (100, 4096, 7)])
def test_rows_of_one_call_may_differ_in_length(native: DrawTokens, sizes: tuple[int, ...]) -> None:
    """A draft head's own tokens, which greedy requests are drafted from, are fewer than the model's."""
    draws = [Draw(logits_of(size, i), SamplingParams(temperature=i % 2), 3, 5, 2) for i, size in enumerate(sizes)]
    assert [[each.token for each in row] for row in native(draws)] == [
        [each.token for each in row] for row in draw_tokens(draws)
    ]
