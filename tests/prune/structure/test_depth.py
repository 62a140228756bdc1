"""Block influence and merging against float64 transcriptions of their papers' equations."""

from __future__ import annotations

import torch
from smelt.prune.score.influence import Influence
from smelt.prune.update.merge import merged


def test_influence_is_one_minus_the_mean_cosine() -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(3, 7, 24, generator=generator)
    after = before + 0.5 * torch.randn(3, 7, 24, generator=generator)
    influence = Influence()
    influence.add(before[:2], after[:2])
    influence.add(before[2:].bfloat16().float(), after[2:])
    x = torch.cat([before[:2], before[2:].bfloat16().float()]).double().flatten(0, 1)
    y = after.double().flatten(0, 1)
    wanted = 1 - sum((a @ b / (a.norm() * b.norm())).item() for a, b in zip(x, y, strict=True)) / len(x)
    assert abs(influence.value - wanted) < 1e-6


def test_a_block_that_only_scales_has_no_influence_and_one_that_negates_has_most() -> None:
    hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    scaled, negated = Influence(), Influence()
    scaled.add(hidden, 3 * hidden)
    negated.add(hidden, -hidden)
    assert abs(scaled.value) < 1e-6
    assert abs(negated.value - 2) < 1e-6


def test_merging_adds_what_the_others_are_apart() -> None:
    generator = torch.Generator().manual_seed(2)
    kept, *others = (torch.randn(6, 4, generator=generator).bfloat16() for _ in range(4))
    wanted = kept.double() + sum(other.double() - kept.double() for other in others)
    found = merged(kept, others)
    assert found.dtype == torch.float32
    assert (found.double() - wanted).abs().max() < 1e-5
