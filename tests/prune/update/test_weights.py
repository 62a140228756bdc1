"""Masks, Wanda and SparseGPT against float64 transcriptions of their papers on random layers."""

from __future__ import annotations

import pytest
import torch
from smelt.prune.score.weights import magnitude, wanda
from smelt.prune.update.sparsegpt import sparsegpt
from smelt.quant.pattern import Pattern
from smelt.quant.sparsity import keep_share
from torch import Tensor

ROWS, COLUMNS = 48, 320


def _layer(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and correlated inputs with strong channels."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    mix = torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5
    strength = torch.exp(torch.randn(COLUMNS, generator=generator))
    return weight, torch.randn(1500, COLUMNS, generator=generator) @ mix * strength


def _error(weight: Tensor, other: Tensor, inputs: Tensor) -> float:
    wanted = inputs.double() @ weight.double().T
    return ((inputs.double() @ other.double().T - wanted).norm() / wanted.norm()).item()


def _reference(weight: Tensor, inputs: Tensor, keep: str | float, damping: float) -> Tensor:
    """SparseGPT's algorithm 1 in float64, by the inverse of the Hessian of the columns that are left."""
    w = weight.double().clone()
    h = inputs.double().T @ inputs.double() / len(inputs)
    h += damping * h.diagonal().mean() * torch.eye(COLUMNS, dtype=torch.float64)
    mask = torch.ones_like(w, dtype=torch.bool)
    for j in range(COLUMNS):
        left = torch.linalg.inv(h[j:, j:])
        together = 128 if isinstance(keep, float) else int(keep[-1])
        if j % together == 0:
            part = slice(j, min(j + together, COLUMNS))
            costs = torch.stack(
                [w[:, i].square() / torch.linalg.inv(h[i:, i:])[0, 0] for i in range(part.start, part.stop)], 1
            )
            chosen = torch.ones_like(costs, dtype=torch.bool)
            if isinstance(keep, float):
                gone = costs.flatten().argsort()[: round(keep * costs.numel())]
                chosen.view(-1)[gone] = False
            else:
                gone = costs.argsort(1)[:, : int(keep[-1]) - int(keep[0])]
                chosen.scatter_(1, gone, False)
            mask[:, part] = chosen
        error = w[:, j] * ~mask[:, j] / left[0, 0]
        w[:, j:] -= error[:, None] * left[0]
        w[:, j] *= mask[:, j]
    return w


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", ["2:4", "4:8", 0.5, 0.7])
def test_sparsegpt_is_the_papers_algorithm(keep: str | float) -> None:
    weight, inputs = _layer()
    hessian = inputs.T @ inputs / len(inputs)
    found, notes = sparsegpt(weight, hessian, Pattern.named(keep) if isinstance(keep, str) else keep)
    wanted = _reference(weight, inputs, keep, 0.01)
    assert not notes
    same = ((found == 0) == (wanted == 0)).double().mean().item()
    assert same > 0.999  # float32 decides a close call otherwise now and then
    assert abs(_error(weight, found, inputs) - _error(weight, wanted, inputs)) < 1e-3
    if same == 1:
        assert (found.double() - wanted).abs().max() < 1e-3


def test_the_rest_is_the_least_squares_solution_for_a_mask_that_takes_the_first_columns() -> None:
    # All that goes is settled before all that stays, so no later choice can undo the compensation.
    weight, inputs = _layer(1)
    hessian = inputs.T @ inputs / len(inputs)
    stays = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    stays[:, :60] = False
    found, _ = sparsegpt(weight, hessian, stays, damping=1e-6)
    x = inputs.double()
    wanted = torch.linalg.lstsq(x[:, 60:], x @ weight.double().T).solution.T
    assert (found[:, :60] == 0).all()
    assert (found[:, 60:].double() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.parametrize("keep", ["2:4", 0.5])
def test_channels_that_are_always_zero_go_first(keep: str | float) -> None:
    weight, inputs = _layer(7)
    inputs = 0.1 * inputs
    inputs[:, ::4] = 0
    hessian = inputs.T @ inputs / len(inputs)
    found, _ = sparsegpt(weight, hessian, Pattern.named(keep) if isinstance(keep, str) else keep)
    without = weight.clone()
    without[:, ::4] = 0
    pruned, _ = sparsegpt(without, hessian, Pattern.named(keep) if isinstance(keep, str) else keep)
    assert (found[:, ::4] == 0).double().mean() > 0.99
    assert _error(weight, found, inputs) < 1.02 * _error(weight, pruned, inputs)


@pytest.mark.parametrize("keep", ["2:4", 0.6])
def test_better_informed_methods_lose_less(keep: str | float) -> None:
    weight, inputs = _layer(2)
    energy = inputs.square().mean(0)

    def masked(score: Tensor, *, by_row: bool) -> Tensor:
        if isinstance(keep, str):
            return weight * Pattern.named(keep).keep(score)
        return weight * keep_share(score, keep, by_row=by_row)

    by_size = _error(weight, masked(magnitude(weight), by_row=False), inputs)
    by_wanda = _error(weight, masked(wanda(weight, energy), by_row=True), inputs)
    made_up = sparsegpt(weight, inputs.T @ inputs / len(inputs), Pattern.named(keep) if isinstance(keep, str) else keep)
    assert _error(weight, made_up[0], inputs) < by_wanda < by_size


def test_wanda_is_the_papers_score() -> None:
    weight, inputs = _layer(3)
    wanted = weight.double().abs() * inputs.double().norm(dim=0)
    found = wanda(weight, inputs.square().mean(0)).double() * len(inputs) ** 0.5
    assert torch.allclose(found, wanted, rtol=1e-5)
    kept = keep_share(found, 0.5, by_row=True)
    threshold = wanted.median(1, keepdim=True).values
    assert torch.equal(kept, wanted > threshold)


@pytest.mark.parametrize(("name", "kept", "of"), [("2:4", 2, 4), ("4:8", 4, 8), ("1:4", 1, 4)])
def test_a_pattern_keeps_the_best_of_each_group(name: str, kept: int, of: int) -> None:
    score = torch.rand(5, 64, generator=torch.Generator().manual_seed(4))
    mask = Pattern.named(name).keep(score)
    assert (mask.view(5, -1, of).sum(-1) == kept).all()
    least_kept = score.masked_fill(~mask, 2).view(5, -1, of).amin(-1)
    most_gone = score.masked_fill(mask, -1).view(5, -1, of).amax(-1)
    assert (least_kept > most_gone).all()


@pytest.mark.parametrize("by_row", [True, False])
def test_a_share_is_exact(by_row: bool) -> None:
    score = torch.rand(7, 50, generator=torch.Generator().manual_seed(5)).round(decimals=1)  # with ties
    mask = keep_share(score, 0.34, by_row=by_row)
    assert (mask.sum(1) == 33).all() if by_row else mask.sum() == 350 - 119
    assert keep_share(score, 0.0, by_row=by_row).all()


@pytest.mark.parametrize("name", ["4:2", "2:2", "0:4", "two"])
def test_what_is_no_pattern(name: str) -> None:
    with pytest.raises(ValueError, match="is not a pattern"):
        Pattern.named(name)


def test_a_hessian_that_cannot_be_factored_still_prunes() -> None:
    weight, _ = _layer(6)
    hessian = torch.full((COLUMNS, COLUMNS), -1.0)
    found, notes = sparsegpt(weight, hessian, Pattern(2, 4))
    assert notes
    assert ((found.view(ROWS, -1, 4) != 0).sum(-1) == 2).all()
