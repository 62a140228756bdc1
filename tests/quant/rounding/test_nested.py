"""Nested rounding: 8 bits that stay 8 bits, whose upper four lose less than if nobody had thought of them."""

from __future__ import annotations

import pytest
import torch
from smelt.quant.layer_stats import LayerStats, StatsCollector
from smelt.quant.rounding.nearest import nearest
from smelt.quant.rounding.nested import nested
from smelt.quant.rounding.options.nested import NestedOptions
from smelt.quant.scheme import resolve
from smelt.quant.stored.quantized_weight import QuantizedWeight
from torch import Tensor

ROWS, COLUMNS, GROUP = 48, 256, 64


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.fixture
def inputs() -> Tensor:
    """With columns that go together, which is what GPTQ makes use of."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(1024, 40, generator=draw) @ torch.randn(40, COLUMNS, generator=draw) + 0.3 * torch.randn(
        1024, COLUMNS, generator=draw
    )


def stats_of(inputs: Tensor) -> LayerStats:
    collector = StatsCollector(COLUMNS, len(inputs), hessian=True)
    collector.add(inputs)
    return collector.result()


def steps_of(rounded: QuantizedWeight) -> Tensor:
    return rounded.grid.step.repeat_interleave(rounded.grid.width, 1)


def codes_of(rounded: QuantizedWeight) -> Tensor:
    return (rounded.values / steps_of(rounded)).round()


def upper_of(rounded: QuantizedWeight) -> Tensor:
    """What the upper four bits mean when they are read alone."""
    return ((codes_of(rounded) / 16).floor() + 0.5) * 16 * steps_of(rounded)


def loss(values: Tensor, weight: Tensor, inputs: Tensor) -> float:
    return float(
        (inputs.double() @ (values.double() - weight.double()).T).norm() / (inputs.double() @ weight.double().T).norm()
    )


def test_the_upper_bits_lose_less_and_all_bits_no_more(weight: Tensor, inputs: Tensor) -> None:
    args = resolve("W4in8", GROUP).args
    plain = nearest(weight, args)
    found = nested(weight, args, stats_of(inputs))
    assert codes_of(found).min() >= -128
    assert codes_of(found).max() <= 127
    assert loss(upper_of(found), weight, inputs) < 0.7 * loss(upper_of(plain), weight, inputs)
    assert loss(found.values, weight, inputs) < 1.1 * loss(plain.values, weight, inputs)


@pytest.mark.parametrize("give", [0.0, 0.125, 0.5])
def test_weights_move_no_further_than_allowed(weight: Tensor, inputs: Tensor, give: float) -> None:
    """By the upper bits: what the lower ones make up for is part of 8 bits' own rounding."""
    found = nested(weight, resolve("W4in8", GROUP).args, stats_of(inputs), NestedOptions(give=give))
    original, first = weight.float() / steps_of(found), (codes_of(found) / 16).floor() * 16
    apart = torch.maximum(first - original, original - (first + 16)).clamp(min=0)
    # The largest weight of a group may be beyond the largest code.
    assert float(apart.max()) <= 16 * give + 0.51


def test_more_give_is_better_for_the_upper_bits(weight: Tensor, inputs: Tensor) -> None:
    args, stats = resolve("W4in8", GROUP).args, stats_of(inputs)
    losses = [
        loss(upper_of(nested(weight, args, stats, NestedOptions(give=give))), weight, inputs)
        for give in (0.0, 0.125, 0.5)
    ]
    assert losses[0] > losses[1] > losses[2]


def test_sweeps_lower_what_both_lose(weight: Tensor, inputs: Tensor) -> None:
    args, stats = resolve("W4in8", GROUP).args, stats_of(inputs)
    without, one, two = (nested(weight, args, stats, NestedOptions(sweeps=count)) for count in (0, 1, 2))
    assert loss(upper_of(without), weight, inputs) > 1.02 * loss(upper_of(one), weight, inputs)
    assert loss(upper_of(one), weight, inputs) > loss(upper_of(two), weight, inputs)


def test_it_ends_where_no_code_alone_is_better(weight: Tensor, inputs: Tensor) -> None:
    """Each single code one up or down, in float64: no upper one within what is allowed, no lower one under its upper one."""
    stats = stats_of(inputs)
    found = nested(weight, resolve("W4in8", GROUP).args, stats, NestedOptions(give=0.125, sweeps=100))
    assert stats.hessian is not None
    hessian = stats.hessian.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(COLUMNS).double()
    steps, codes = steps_of(found).double(), codes_of(found).double()
    original, upper = weight.double() / steps, (codes / 16).floor()
    lowest, highest = ((original / 16 + way * 0.125).floor().clamp(-8, 7) for way in (-1, 1))
    for values, now, step, least, most in (
        ((upper + 0.5) * 16 * steps, upper, 16 * steps, lowest, highest),
        (codes * steps, codes, steps, upper * 16, upper * 16 + 15),
    ):
        pull = (weight.double() - values) @ hessian
        for way in (-1, 1):
            cost = step.square() * hessian.diagonal()
            gain = 2 * way * step * pull - cost
            assert not ((now + way >= least) & (now + way <= most) & (gain > 1e-3 * cost)).any()


def test_without_inputs_it_rounds_to_nearest(weight: Tensor) -> None:
    args = resolve("W4in8", GROUP).args
    found = nested(weight, args, stats_of(torch.zeros(0, COLUMNS)))
    assert torch.equal(found.values, nearest(weight, args).values)
    assert "no calibration token" in found.notes[0]


@pytest.mark.parametrize("sweeps", [0, NestedOptions().sweeps])
def test_pruned_weights_stay_zero(weight: Tensor, inputs: Tensor, sweeps: int) -> None:
    """2:4 and whole parts. No upper four bits stand for zero, so that these lose more; all bits must not."""
    args, stats = resolve("W4in8", GROUP).args, stats_of(inputs)
    smallest = weight.view(ROWS, -1, 4).abs().float().argsort(-1)[..., :2]
    pruned = weight.view(ROWS, -1, 4).scatter(-1, smallest, 0.0).view(ROWS, COLUMNS)
    found = nested(pruned, args, stats, NestedOptions(sweeps=sweeps))
    assert not found.values[pruned == 0].any()
    # Without sweeps the upper bits lose too much for the lower ones to make up for.
    assert not sweeps or loss(found.values, pruned, inputs) < 1.1 * loss(nearest(pruned, args).values, pruned, inputs)
    assert not nested(torch.zeros_like(weight), args, stats, NestedOptions(sweeps=sweeps)).values.any()


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_other_formats_are_refused(weight: Tensor, scheme: str) -> None:
    with pytest.raises(ValueError, match="symmetric codes of 8 bits"):
        nested(weight, resolve(scheme).args)
