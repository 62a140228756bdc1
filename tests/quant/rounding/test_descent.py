"""Coordinate descent after GPTQ, judged in float64: it never makes the layer's error worse, and ends where no single change helps."""

from __future__ import annotations

import pytest
import torch
from smelt.quant.grid import Grid
from smelt.quant.rounding import descent
from smelt.quant.rounding.descent import descend
from smelt.quant.rounding.gptq import GptqOptions, gptq
from smelt.quant.rounding.nearest import nearest
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import SUPPORTED
from smelt.quant.stored.compressed_tensors import restore
from torch import Tensor

from .test_rounding import _inputs, _stats

DAMPING = 0.01


def _damped(hessian: Tensor) -> Tensor:
    hessian = hessian.double()
    return hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian)).double()


def _error(weight: Tensor, values: Tensor, hessian: Tensor) -> Tensor:
    """Of each row."""
    off = weight.double() - values.double()
    return ((off @ _damped(hessian)) * off).sum(1)


def _layer(rows: int = 24, columns: int = 128) -> tuple[Tensor, Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    hessian = _stats(_inputs(columns)).hessian
    assert hessian is not None
    return weight, hessian


@pytest.mark.few(6)
@pytest.mark.parametrize("name", SUPPORTED)
def test_each_sweep_lowers_the_error_in_every_format(name: str) -> None:
    scheme = resolve(name)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    stats = _stats(_inputs(256))
    assert stats.hessian is not None
    found = [gptq(weight, scheme.args, stats, GptqOptions(sweeps=count)) for count in (0, 1, 3)]
    errors = [_error(weight, each.values, stats.hessian) for each in found]
    assert (errors[1] <= errors[0] * (1 + 1e-4)).all()
    assert (errors[2] <= errors[1] * (1 + 1e-4)).all()
    assert errors[1].sum() < 0.998 * errors[0].sum()
    for each in found:
        back = restore(each.stored(scheme), scheme).float()
        assert torch.allclose(back, each.values, rtol=2**-8, atol=0)  # some formats restore in bfloat16


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "group"), [("W2A16", 32), ("W3A16", -1), ("W4A16_ASYM", 64)])
def test_it_ends_where_no_code_and_no_scale_alone_is_better(name: str, group: int) -> None:
    scheme = resolve(name, group)
    weight, hessian = _layer()
    start = nearest(weight, scheme.args)
    values = start.values.clone()
    grid = descend(values, weight - values, start.grid, hessian, DAMPING, 200)
    least = _error(weight, values, hessian)
    assert (least < 0.9 * _error(weight, start.values, hessian)).all()

    bits, width = scheme.args.num_bits, grid.width
    step, zero = grid.step.double(), torch.zeros_like(grid.step) if grid.zero is None else grid.zero
    tolerance = 1 + 1e-5
    for column in range(weight.shape[1]):
        for code in range(-(2 ** (bits - 1)), 2 ** (bits - 1)):
            other = values.double()
            other[:, column] = (code - zero[:, column // width]) * step[:, column // width]
            assert (_error(weight, other, hessian) * tolerance >= least).all()
    for group in range(step.shape[1]):
        for factor in (0.98, 0.995, 1.005, 1.02):
            other = values.double()
            other[:, group * width : (group + 1) * width] *= factor
            assert (_error(weight, other, hessian) * tolerance >= least).all()


def test_what_must_stay_zero_does() -> None:
    weight, hessian = _layer()
    stays = torch.rand(weight.shape, generator=torch.Generator().manual_seed(4)) > 0.5
    start = nearest(weight * stays, resolve("W4A16", 32).args)
    values = start.values * stays
    before = _error(weight, values, hessian)
    descend(values, weight - values, start.grid, hessian, DAMPING, 3, stays)
    assert (values[~stays] == 0).all()
    assert (_error(weight, values, hessian) < before).all()


def test_rows_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = _layer(50)
    start = nearest(weight, resolve("W3A16", 32).args)

    def found() -> tuple[Tensor, Grid]:
        values = start.values.clone()
        return values, descend(values, weight - values, start.grid, hessian, DAMPING, 2)

    whole, grid = found()
    monkeypatch.setattr(descent, "_ELEMENTS", 20 * 128)
    parts, again = found()
    same = (whole - parts).abs() < 1e-5
    assert same.float().mean() > 0.99  # a sum in another order can tip a code on an edge
    assert torch.isclose(grid.scale, again.scale, rtol=1e-4).float().mean() > 0.95


def test_columns_that_no_input_reaches_are_rounded_to_nearest() -> None:
    weight, hessian = _layer()
    hessian[:16], hessian[:, :16] = 0, 0
    scheme = resolve("W4A16", 16)
    start = nearest(weight, scheme.args)
    values = start.values.clone()
    grid = descend(values, weight - values, start.grid, hessian, DAMPING, 2)
    assert torch.isfinite(values).all()
    assert torch.equal(values[:, :16], grid.round(weight)[:, :16])


def test_a_group_of_zeros_keeps_its_scale() -> None:
    weight, hessian = _layer()
    weight[:, 32:64] = 0
    start = nearest(weight, resolve("W4A16", 32).args)
    values = start.values.clone()
    grid = descend(values, weight - values, start.grid, hessian, DAMPING, 2)
    assert torch.isfinite(values).all()
    assert (grid.scale != 0).all()
