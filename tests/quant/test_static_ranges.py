"""Ranges of inputs whose scales calibration fixes, against sums in float64 over everything that came."""

from __future__ import annotations

import pytest
import torch
from smelt.quant.activations import ActivationRounding
from smelt.quant.layer_stats import LayerStats, StatsCollector
from smelt.quant.scheme import resolve
from torch import Tensor

TOKENS, COLUMNS = 20_000, 48


def _stats(inputs: Tensor) -> LayerStats:
    collector = StatsCollector(COLUMNS, len(inputs), hessian=False)
    for batch in inputs.split(2_000):
        collector.add(batch)
    return collector.result()


def _heavy_tailed() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, COLUMNS, generator=generator) * torch.rand(TOKENS, 1, generator=generator).pow(-0.4)
    return inputs, torch.rand(COLUMNS, generator=generator) * 10


def _error(inputs: Tensor, energy: Tensor, scale: Tensor, zero: Tensor | None) -> float:
    """What rounding takes from the outputs of a weight whose columns have this energy and are orthogonal."""
    middle = 0 if zero is None else zero.double()
    codes = (inputs.double() / scale.double() + middle).round().clamp(-128, 127) - middle
    return ((codes * scale.double() - inputs.double()).square().sum(0) @ energy.double()).item()


@pytest.mark.parametrize("kind", ["static", "static_asymmetric"])
def test_the_range_that_is_cut_loses_least_on_all_inputs(kind: str) -> None:
    inputs, energy = _heavy_tailed()
    inputs += kind == "static_asymmetric"
    args = resolve("W8A8", inputs=kind).activations
    assert args is not None
    found = ActivationRounding.fitted(args, _stats(inputs), energy, torch.float32)
    widest = ActivationRounding.observed(args, inputs.amin(), inputs.amax(), torch.float32)
    assert found.scale is not None
    assert widest.scale is not None
    assert found.scale < 0.8 * widest.scale
    mine = _error(inputs, energy, found.scale, found.zero)
    assert mine < 0.5 * _error(inputs, energy, widest.scale, widest.zero)
    if kind == "static":
        least = min(_error(inputs, energy, widest.scale * share / 50, None) for share in range(1, 51))
        assert mine < 1.15 * least


def test_an_extreme_that_the_sample_misses_is_not_cut_off() -> None:
    inputs, energy = _heavy_tailed()
    inputs[7, 3] = 30_000.0  # the sample has every 20th token
    args = resolve("W8A8", inputs="static").activations
    assert args is not None
    stats = _stats(inputs)
    assert stats.rows.abs().max() < 1_000
    found = ActivationRounding.fitted(args, stats, energy, torch.float32)
    widest = ActivationRounding.observed(args, inputs.amin(), inputs.amax(), torch.float32)
    assert found.scale is not None
    assert widest.scale is not None
    assert _error(inputs, energy, found.scale, None) <= _error(inputs, energy, widest.scale, None)
    sample_alone = stats.rows.abs().max().reshape(1) / 127.5
    assert _error(inputs, energy, found.scale, None) < 0.1 * _error(inputs, energy, sample_alone, None)


def test_formats_without_a_choice_keep_their_ranges() -> None:
    inputs, energy = _heavy_tailed()
    stats = _stats(inputs)
    for name in ("FP8", "NVFP4", "W8A8"):
        args = resolve(name).activations
        assert args is not None
        found = ActivationRounding.fitted(args, stats, energy, torch.float32)
        plain = ActivationRounding.observed(args, inputs.amin(), inputs.amax(), torch.float32)
        assert (found.scale, found.global_scale) == (plain.scale, plain.global_scale)
    nothing = _stats(inputs[:0])
    args = resolve("W8A8", inputs="static").activations
    assert args is not None
    assert ActivationRounding.fitted(args, nothing, energy, torch.float32).scale is not None
