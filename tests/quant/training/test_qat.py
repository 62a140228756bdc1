"""Linears that are trained while they are rounded: what they compute, what they store, and their gradients."""

from __future__ import annotations

import pytest
import torch
from smelt.quant.grid import Grid, largest_code
from smelt.quant.rounding import METHODS
from smelt.quant.scheme import Scheme, resolve
from smelt.quant.scheme_names import SUPPORTED
from smelt.quant.stored.compressed_tensors import restore
from smelt.quant.training.qat import QatLinear, latent_start, stored_grid, stored_values
from torch import Tensor

ROWS, COLUMNS = 48, 256


def _weight(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) / 16


def _rounded(scheme: Scheme, weight: Tensor, stored: torch.dtype) -> tuple[dict[str, Tensor], Grid]:
    nearest = METHODS["nearest"]
    found = nearest.function(weight.to(stored), scheme.args, None, nearest.options(), None)  # type: ignore[arg-type]
    tensors = found.stored(scheme)
    return tensors, stored_grid(tensors, scheme, (ROWS, COLUMNS))


def _linear(scheme: Scheme, stored: torch.dtype = torch.float32, **changes: object) -> QatLinear:
    tensors, grid = _rounded(scheme, _weight(), stored)
    latent = latent_start(_weight(), stored_values(tensors, scheme, grid), grid)
    return QatLinear(latent, grid, stored, torch.float32, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SUPPORTED)
def test_what_is_stored_is_what_was_computed_with(name: str, stored: torch.dtype) -> None:
    scheme = resolve(name)
    if scheme.args.num_bits == 4 and scheme.args.type == "float" and stored == torch.float32:
        pytest.skip("4-bit floats are restored as bfloat16, and recipes refuse them for other models")
    linear = _linear(scheme, stored)
    tensors, _ = _rounded(scheme, _weight(), stored)
    assert torch.equal(linear.weight, restore(tensors, scheme).float())  # training begins where the rounding ended
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(step))
        (linear(inputs) - inputs[:, :ROWS]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = restore(linear.rounded().stored(scheme), scheme)
    assert after.dtype == stored
    assert torch.equal(linear.weight, after.float())
    assert not torch.equal(after, restore(tensors, scheme))


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W2A16", "W8A8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"])
def test_gradients_are_those_of_clamping_and_of_rounding_straight_through(name: str) -> None:
    scheme = resolve(name)
    linear = _linear(scheme, torch.bfloat16)
    with torch.no_grad():
        linear.latent += 0.3 * _weight(1)  # so that some are out of range
        if linear.clip is not None:
            linear.clip *= 0.8
    slope = _weight(2)
    linear.weight.backward(slope)
    # The same written with torch's own operations, which it differentiates itself.
    latent = linear.latent.detach().clone().requires_grad_()
    clip = None if linear.clip is None else linear.clip.detach().clone().requires_grad_()
    grid, args = linear.grid, scheme.args
    scale = grid.scale.float() if clip is None else grid.scale.float() * clip
    scale = scale + (scale.to(grid.scale.dtype).float() - scale).detach()
    step = scale
    if args.strategy == "block":
        assert args.block_structure is not None
        step = step.repeat_interleave(args.block_structure[0], 0)[:ROWS]
    if grid.global_scale is not None:
        step = step / grid.global_scale
    step = step.repeat_interleave(grid.width, 1)[:, :COLUMNS]
    zero = 0.0 if grid.zero is None else grid.zero.repeat_interleave(grid.width, 1)
    most = largest_code(args)
    place = (latent / step + zero).clamp(-most - (args.type == "int"), most)
    codes = (linear.weight.detach() / step.detach() + zero).detach()
    value = (place + (codes - place).detach() - zero) * step
    value.backward(slope)
    assert linear.latent.grad is not None
    assert latent.grad is not None
    torch.testing.assert_close(linear.latent.grad, latent.grad, atol=2e-3, rtol=2e-2)
    if clip is not None:
        assert linear.clip is not None
        assert linear.clip.grad is not None
        assert clip.grad is not None
        torch.testing.assert_close(linear.clip.grad, clip.grad, atol=5e-3, rtol=2e-2)


def test_training_begins_in_the_cells_of_codes_that_another_method_chose() -> None:
    scheme, weight = resolve("W2A16", 64), _weight()
    tensors, grid = _rounded(scheme, weight + 0.03 * _weight(1), torch.float32)  # codes that are not the nearest
    latent = latent_start(weight, stored_values(tensors, scheme, grid), grid)
    assert torch.equal(grid.round(latent), restore(tensors, scheme))
    far = (latent - weight).abs()
    assert far.mean() < (restore(tensors, scheme) - weight).abs().mean()
    assert (far == 0).float().mean() > 0.5


@pytest.mark.parametrize("name", SUPPORTED)
def test_training_begins_near_the_original_and_not_at_an_edge(name: str) -> None:
    scheme, weight = resolve(name), _weight().to(torch.bfloat16).float()
    tensors, grid = _rounded(scheme, weight, torch.bfloat16)
    codes = grid.round(restore(tensors, scheme).float())
    latent = latent_start(weight, stored_values(tensors, scheme, grid), grid)
    assert torch.equal(grid.round(latent), codes)
    far, before = (latent - weight).abs(), (codes - weight).abs()
    assert (far <= before * (1 + 1e-5)).all()
    assert far.mean() < 0.15 * before.mean()
    # So do weights for which another method chose a code that is not the nearest.
    assert torch.equal(grid.round(latent_start(weight + 2 * (weight - codes), codes, grid)), codes)


@pytest.mark.parametrize("rank", [None, 4])
def test_training_lowers_the_error_of_outputs(rank: int | None) -> None:
    scheme = resolve("W2A16", 64)
    linear, wanted = _linear(scheme, rank=rank), _weight()
    trained = [p for p in linear.parameters() if p.requires_grad]
    assert linear.latent.requires_grad == (rank is None)
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    inputs = torch.randn(512, COLUMNS // 16, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        COLUMNS // 16, COLUMNS, generator=torch.Generator().manual_seed(1)
    )  # which depend on each other, so that one weight can make up for another
    errors = []
    for _ in range(60):
        error = (linear(inputs) - inputs @ wanted.T).square().mean()
        errors.append(float(error.detach()))
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert errors[-1] < (0.7 if rank is None else 0.95) * errors[0]


def test_scales_that_the_format_fixes_are_not_trained() -> None:
    assert _linear(resolve("MXFP4A16"), torch.bfloat16).clip is None
    assert _linear(resolve("W4A16")).clip is not None
    assert _linear(resolve("W4A16"), learn_scales=False).clip is None


def test_pruned_weights_stay_zero_beside_a_product() -> None:
    scheme, weight = resolve("W4A16", 64), _weight()
    weight[:, ::2] = 0
    tensors, grid = _rounded(scheme, weight, torch.float32)
    latent = latent_start(weight, stored_values(tensors, scheme, grid), grid)
    linear = QatLinear(latent, grid, torch.float32, torch.float32, rank=4, stays=weight != 0)
    assert linear.up is not None
    with torch.no_grad():
        linear.up += 1
    assert not linear.weight[:, ::2].any()
    assert linear.weight[:, 1::2].any()
