"""Linears whose upper four of 8 bits are trained: what they compute, what they store, and how far both may go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from smelt.quant.rounding import METHODS
from smelt.quant.scheme import resolve
from smelt.quant.training.nested import NestedQatLinear
from smelt.quant.training.qat import stored_grid, stored_values
from torch import Tensor

ROWS, COLUMNS, GROUP = 48, 256, 64
SCHEME = resolve("W4in8", GROUP)


def _weight(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) / 16


def _linear(
    give: float = 0.25, stored: torch.dtype = torch.float32, rank: int | None = None
) -> tuple[NestedQatLinear, dict[str, Tensor]]:
    nearest = METHODS["nearest"]
    found = nearest.function(_weight().to(stored), SCHEME.args, None, nearest.options(), None)  # type: ignore[arg-type]
    tensors = found.stored(SCHEME)
    grid = stored_grid(tensors, SCHEME, (ROWS, COLUMNS))
    rounded = stored_values(tensors, SCHEME, grid)
    return NestedQatLinear(_weight(), rounded, grid, give, torch.float32, rank=rank), tensors


def _codes(tensors: dict[str, Tensor]) -> np.ndarray:
    return unpack_from_int32(tensors["weight_packed"], 8, torch.Size((ROWS, COLUMNS))).numpy().astype(np.int64)


def _upper(tensors: dict[str, Tensor]) -> np.ndarray:
    """What the upper four bits of stored codes stand for: the middle of the sixteen codes that share them."""
    scale = tensors["weight_scale"].double().numpy().repeat(GROUP, 1)
    return ((_codes(tensors) >> 4) * 16 + 8) * scale


def _trained(linear: NestedQatLinear, steps: int = 60) -> list[float]:
    """Towards the original's outputs, of inputs that depend on each other, so that one weight can make up for another."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=draw) @ torch.randn(16, COLUMNS, generator=draw)
    optimizer = torch.optim.Adam([p for p in linear.parameters() if p.requires_grad], lr=1e-3)
    errors = []
    for _ in range(steps):
        error = (linear(inputs) - inputs @ _weight().T).square().mean()
        errors.append(float(error.detach()))
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
    return errors


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_it_computes_with_the_upper_bits_of_what_is_stored(stored: torch.dtype) -> None:
    linear, tensors = _linear(stored=stored)
    kept = linear.rounded().stored(SCHEME)
    assert np.array_equal(_codes(kept) >> 4, _codes(tensors) >> 4)  # training begins where the rounding ended
    for _ in range(2):
        found = linear.weight.detach().double().numpy()
        np.testing.assert_allclose(found, _upper(kept), rtol=1e-6)
        _trained(linear, 10)
        kept = linear.rounded().stored(SCHEME)
    assert (_codes(kept) >> 4 != _codes(tensors) >> 4).any()
    assert torch.equal(kept["weight_scale"], tensors["weight_scale"])


@pytest.mark.parametrize("rank", [None, 4])
def test_training_lowers_the_error_of_the_upper_bits_alone(rank: int | None) -> None:
    linear, _ = _linear(give=0.5, rank=rank)
    errors = _trained(linear)
    assert errors[-1] < (0.6 if rank is None else 0.95) * errors[0]


@pytest.mark.parametrize("give", [0.0, 0.125, 0.5])
def test_all_bits_stay_as_near_the_original_as_they_must(give: float) -> None:
    linear, tensors = _linear(give)
    with torch.no_grad():
        linear.latent += _weight(1)  # a whole standard deviation
    codes = _codes(linear.rounded().stored(SCHEME))
    scale = tensors["weight_scale"].double().numpy().repeat(GROUP, 1)
    exact = _weight().double().numpy() / scale
    away = np.abs(codes - np.clip(exact, -128, 127))
    assert away.max() <= 1 + give * 16 + 1e-3  # cells begin at a code, not halfway between two
    # Of the sixteen codes that share the upper bits, none is nearer.
    first = codes >> 4 << 4
    nearest = np.abs(first[..., None] + np.arange(16) - exact[..., None]).min(-1)
    np.testing.assert_allclose(np.abs(codes - exact), nearest, atol=1e-4)
    assert (away.max() > 1) == (give > 0)


def test_a_weight_at_its_limit_is_not_held_there() -> None:
    linear, tensors = _linear(give=0.125)
    scale = tensors["weight_scale"].repeat_interleave(GROUP, 1)
    with torch.no_grad():
        linear.latent.copy_(_weight() + torch.where(_weight(1) > 0, 5 * scale, -5 * scale))
    slope = _weight(2)
    linear.weight.backward(slope)
    assert linear.latent.grad is not None
    inside = ((_weight() / scale).abs() < 120) & (linear.weight.abs() < 120 * scale)
    assert inside.float().mean() > 0.9
    assert torch.equal(linear.latent.grad[inside], slope[inside])
