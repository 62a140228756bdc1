"""Scores of channels against float64 references."""

from __future__ import annotations

import torch
from smelt.prune.score.units import UNIT_SCORES, UnitFacts, path_scores

from ..random_layer import random_layer


def test_scores() -> None:
    weight, inputs = random_layer()
    energy = inputs.square().mean(0)
    norms, columns = inputs.double().norm(dim=0) / 2000**0.5, weight.double().norm(dim=0)
    for name, wanted in (("activation", norms), ("weight", columns), ("wanda", norms * columns)):
        assert torch.allclose(UNIT_SCORES[name].compute(UnitFacts(weight, 1, energy)).double(), wanted, rtol=1e-5)


def test_scores_of_heads_are_those_of_their_channels_together() -> None:
    weight, inputs = random_layer()
    x, columns = inputs.double(), weight.double()
    found = UNIT_SCORES["wanda"].compute(UnitFacts(weight, 32, inputs.square().mean(0)))
    for head in range(3):
        part = slice(32 * head, 32 * head + 32)
        each = x[:, part].square().sum(0) / 2000 * columns[:, part].square().sum(0)
        assert torch.isclose(found[head].double(), each.sum().sqrt(), rtol=1e-5)


def test_the_path_score_is_the_product_of_norms() -> None:
    generator = torch.Generator().manual_seed(1)
    matrices = [torch.randn(6, 2, 8, generator=generator) for _ in range(3)]
    wanted = torch.stack([each.double().flatten(1).norm(dim=1) for each in matrices]).prod(0)
    assert torch.allclose(path_scores(matrices).double(), wanted, rtol=1e-5)
