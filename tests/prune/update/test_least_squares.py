"""The least-squares update against float64 references."""

from __future__ import annotations

import torch
from smelt.prune.update.least_squares import refitted

from ..random_layer import random_layer


def test_the_refit_is_the_least_squares_solution() -> None:
    weight, inputs = random_layer()
    kept = torch.arange(0, 96, 2)
    found, notes = refitted(weight, inputs.T @ inputs / 2000, kept, damping=1e-9)
    x = inputs.double()
    wanted = torch.linalg.lstsq(x[:, kept], x @ weight.double().T).solution.T
    assert not notes
    assert (found.double() - wanted).norm() / wanted.norm() < 1e-4


def test_damping_keeps_to_the_columns_as_they_are() -> None:
    weight, inputs = random_layer()
    kept = torch.arange(10)
    found, _ = refitted(weight, inputs.T @ inputs / 2000, kept, damping=1e9)
    assert torch.allclose(found, weight[:, kept], atol=1e-5)


def test_channels_that_nothing_ever_reaches_leave_the_columns_alone() -> None:
    weight, _ = random_layer()
    found, notes = refitted(weight, torch.zeros(96, 96), torch.arange(20))
    assert torch.equal(found, weight[:, :20])
    assert notes
