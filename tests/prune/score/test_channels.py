"""Scores of channels and the least-squares refit against float64 references."""

from __future__ import annotations

import torch
from smelt.prune.score.units import UNIT_SCORES, UnitFacts, path_scores
from smelt.prune.update.least_squares import refitted
from torch import Tensor


def _layer() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(96, 96, generator=generator) / 96**0.5
    inputs = torch.randn(2000, 96, generator=generator) @ mix * torch.exp(torch.randn(96, generator=generator))
    return torch.randn(40, 96, generator=generator), inputs


def test_scores() -> None:
    weight, inputs = _layer()
    energy = inputs.square().mean(0)
    norms, columns = inputs.double().norm(dim=0) / 2000**0.5, weight.double().norm(dim=0)
    for name, wanted in (("activation", norms), ("weight", columns), ("wanda", norms * columns)):
        assert torch.allclose(UNIT_SCORES[name].compute(UnitFacts(weight, 1, energy)).double(), wanted, rtol=1e-5)


def test_scores_of_heads_are_those_of_their_channels_together() -> None:
    weight, inputs = _layer()
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


def test_the_refit_is_the_least_squares_solution() -> None:
    weight, inputs = _layer()
    kept = torch.arange(0, 96, 2)
    found, notes = refitted(weight, inputs.T @ inputs / 2000, kept, damping=1e-9)
    x = inputs.double()
    wanted = torch.linalg.lstsq(x[:, kept], x @ weight.double().T).solution.T
    assert not notes
    assert (found.double() - wanted).norm() / wanted.norm() < 1e-4


def test_damping_keeps_to_the_columns_as_they_are() -> None:
    weight, inputs = _layer()
    kept = torch.arange(10)
    found, _ = refitted(weight, inputs.T @ inputs / 2000, kept, damping=1e9)
    assert torch.allclose(found, weight[:, kept], atol=1e-5)


def test_channels_that_nothing_ever_reaches_leave_the_columns_alone() -> None:
    weight, _ = _layer()
    found, notes = refitted(weight, torch.zeros(96, 96), torch.arange(20))
    assert torch.equal(found, weight[:, :20])
    assert notes
