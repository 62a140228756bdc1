"""Removing weights while rounding: against a float64 transcription of SparseGPT's equations with quantization in the same pass."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from smelt.prune.update.sparsegpt import sparsegpt
from smelt.quant.grid import Grid
from smelt.quant.layer_stats import LayerStats
from smelt.quant.rounding.gptq import GptqOptions, gptq
from smelt.quant.rounding.nearest import nearest
from smelt.quant.scheme import resolve
from torch import Tensor

SCHEME = resolve("W4A16", 32)
OPTIONS = {"activation_order": False, "scale_search": False, "sweeps": 0}


def _layer(columns: int = 256) -> tuple[Tensor, LayerStats]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    inputs = (
        torch.randn(2000, columns, generator=generator) @ mix * torch.exp(torch.randn(columns, generator=generator))
    )
    hessian = inputs.T @ inputs / len(inputs)
    return torch.randn(24, columns, generator=generator), LayerStats(hessian, inputs[:512], len(inputs))


def _papers(weight: Tensor, hessian: Tensor, of: int | None, share: float) -> Tensor:
    """Algorithm 1 of the paper with its quantization line, through the inverse Hessian's Cholesky factor."""
    columns = weight.shape[1]
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(columns).double()
    inverse = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    work, grid = weight.double().clone(), Grid.fit(weight, SCHEME.args)
    found, mask = torch.zeros_like(work), torch.ones_like(work, dtype=torch.bool)
    for j in range(columns):
        if of is not None and j % of == 0:
            part = slice(j, j + of)
            score = work[:, part] ** 2 / inverse.diagonal()[part] ** 2
            worst = score.topk(of // 2, 1, largest=False).indices
            mask[:, part] = torch.ones_like(score, dtype=torch.bool).scatter(1, worst, False)
        if of is None and j % 128 == 0:
            part = slice(j, j + 128)
            score = work[:, part] ** 2 / inverse.diagonal()[part] ** 2
            worst = score.flatten().topk(round(share * score.numel()), largest=False).indices
            mask[:, part] = torch.ones(score.numel(), dtype=torch.bool).scatter(0, worst, False).view(score.shape)
        step = grid.step[:, j // 32].double()
        code = (work[:, j] / step).round().clamp(-8, 7) * step
        found[:, j] = code * mask[:, j]
        error = (work[:, j] - found[:, j]) / inverse[j, j]
        work[:, j:] -= error[:, None] * inverse[j, j:]
    return found


@pytest.mark.parametrize(("sparsity", "of"), [("2:4", 4), ("4:8", 8), (0.5, None)])
def test_it_is_the_papers_algorithm(sparsity: str | float, of: int | None) -> None:
    weight, stats = _layer()
    assert stats.hessian is not None
    found = gptq(weight, SCHEME.args, stats, GptqOptions(sparsity=sparsity, **OPTIONS)).values
    wanted = _papers(weight, stats.hessian, of, 0.5)
    assert ((found == 0) == (wanted == 0)).float().mean() > 0.999  # a tie, here and there
    assert (found.double() - wanted).norm() / wanted.norm() < 0.02


def _loss(weight: Tensor, found: Tensor, stats: LayerStats) -> float:
    assert stats.hessian is not None
    difference = (weight - found).double()
    return ((difference @ stats.hessian.double()) * difference).sum().item()


@pytest.mark.parametrize("sparsity", ["2:4", 0.5])
def test_together_loses_less_than_one_after_another_to_nearest(sparsity: str | float) -> None:
    from smelt.quant.pattern import Pattern

    weight, stats = _layer()
    assert stats.hessian is not None
    together = gptq(weight, SCHEME.args, stats, GptqOptions(sparsity=sparsity)).values
    share = Pattern.named(sparsity) if isinstance(sparsity, str) else sparsity
    pruned = sparsegpt(weight, stats.hessian, share)[0]
    after = nearest(pruned, SCHEME.args).values * (pruned != 0)
    assert _loss(weight, together, stats) < _loss(weight, after, stats)
    assert abs((together == 0).float().mean().item() - 0.5) < 0.06  # some codes are zero anyway


def test_what_was_pruned_before_stays_zero_too() -> None:
    weight, stats = _layer()
    weight[:, ::4] = 0
    found = gptq(weight, SCHEME.args, stats, GptqOptions(sparsity="2:4")).values
    assert (found[:, ::4] == 0).all()
    assert ((found != 0).view(24, -1, 4).sum(-1) <= 2).all()


def test_without_inputs_the_smallest_go() -> None:
    weight, _ = _layer()
    nothing = LayerStats(None, torch.zeros(0, 256), 0)
    result = gptq(weight, SCHEME.args, nothing, GptqOptions(sparsity="2:4"))
    assert ((result.values != 0).view(24, -1, 4).sum(-1) <= 2).all()
    assert result.notes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sparsity": 1.5}, "neither a fraction between 0 and 1"),
        ({"sparsity": "4:2"}, "is not a pattern"),
        ({"sparsity": "3:5"}, "which groups of 5 do not divide"),
        ({"sparsity": 0.5, "refit_groups": True}, "keep one"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        GptqOptions.model_validate(options)
    assert GptqOptions.model_validate({"sparsity": 124}).sparsity == "2:4"  # YAML's 2:4 without quotes
