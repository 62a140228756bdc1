"""The grid's arithmetic against compressed-tensors' own quantize and dequantize."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from smelt.quant.grid import Grid, round_codes
from smelt.quant.layer_stats import StatsCollector
from smelt.quant.rounding import METHODS
from smelt.quant.rounding.nearest import nearest
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import SUPPORTED
from smelt.quant.stored.compressed_tensors import restore
from smelt.quant.stored.quantized_weight import QuantizedWeight


def _weight(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(256, 384, generator=generator) * torch.logspace(-3, 1, 256)[:, None]
    weight[7] = 0
    weight[8, :128] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SUPPORTED)
def test_rounding_is_compressed_tensors_rounding(name: str, dtype: torch.dtype) -> None:
    scheme = resolve(name)
    weight = _weight(dtype)
    grid = Grid.fit(weight, scheme.args)
    expected = fake_quantize(weight.float(), grid.scale.float(), grid.zero, scheme.args, global_scale=grid.global_scale)
    torch.testing.assert_close(grid.round(weight.float()), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SUPPORTED)
def test_what_is_stored_restores_to_the_rounded_values(name: str, dtype: torch.dtype) -> None:
    scheme = resolve(name)
    quantized = nearest(_weight(dtype), scheme.args)
    restored = restore(quantized.stored(scheme), scheme)
    # The library restores fp4 in bfloat16 whatever the model's type, and everything else in the scale's type.
    limits = torch.finfo(restored.dtype)
    torch.testing.assert_close(
        restored.float(), quantized.values, rtol=limits.eps, atol=limits.smallest_normal * limits.eps
    )


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_of_a_stack_are_what_the_weight_alone_gives(name: str) -> None:
    scheme = resolve(name)
    if scheme.args.strategy in ("block", "tensor_group"):
        pytest.skip("blocks are never stacked, and a tensor's global scale is shared by the stack on purpose")
    first, second = _weight(torch.bfloat16).split(128)
    stacked: QuantizedWeight = nearest(torch.cat([first, second]), scheme.args)
    for part, alone in ((stacked.rows(0, 128), first), (stacked.rows(128, 256), second)):
        for key, tensor in nearest(alone, scheme.args).stored(scheme).items():
            assert torch.equal(part.stored(scheme)[key], tensor), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "nested"])
def test_zero_points_are_stored_bit_for_bit(method: str, group: int, dtype: torch.dtype) -> None:
    """Codes, scales and zero-points that compressed-tensors unpacks mean the very values that were chosen."""
    scheme = resolve("W4A16_ASYM", group)
    weight = _weight(dtype) + 0.05  # a weight whose zero is not in the middle
    collector = StatsCollector(384, 512, hessian=True)
    collector.add(torch.randn(512, 384, generator=torch.Generator().manual_seed(1)))
    chosen = METHODS[method].function(weight, scheme.args, collector.result(), METHODS[method].options())
    stored = chosen.stored(scheme)
    shape = torch.Size(chosen.grid.scale.shape)
    zero = unpack_from_int32(stored["weight_zero_point"], 4, shape, packed_dim=0)
    codes = unpack_from_int32(stored["weight_packed"], 4, torch.Size(weight.shape))
    assert chosen.grid.zero is not None
    assert torch.equal(zero.float(), chosen.grid.zero)
    assert int(zero.min()) < 0 < int(codes.max())
    steps = stored["weight_scale"].float().repeat_interleave(chosen.grid.width, 1)
    assert torch.equal((codes - zero.repeat_interleave(chosen.grid.width, 1)).float() * steps, chosen.values)
    if dtype == torch.float32:
        assert torch.equal(restore(stored, scheme), chosen.values)


def test_fp4_codes_are_the_librarys_on_every_tie() -> None:
    args = resolve("NVFP4A16").args
    values = torch.cat([torch.linspace(-7, 7, 2801), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    values = torch.cat([values, -values])
    expected = FP4_E2M1_DATA.cast_to_fp4(values.clamp(-6, 6).clone())
    assert torch.equal(round_codes(values, args).abs(), expected.abs())
    assert torch.equal(round_codes(values, args), expected + 0.0)


def test_integers_round_half_to_even_and_saturate() -> None:
    args = resolve("W4A16").args
    codes = round_codes(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 7.6, -8.6]), args)
    assert codes.tolist() == [0, 2, 2, 0, -2, 7, -8]


def test_the_published_symmetric_int4_scale() -> None:
    weight = torch.tensor([[7.5, -3.0, 0.0, 1.0]])
    grid = Grid.fit(weight, resolve("W4A16", -1).args)
    assert grid.scale.item() == 1.0


def test_tiny_weights_do_not_lose_their_scale() -> None:
    weight = torch.full((4, 128), 1e-9, dtype=torch.float16)
    assert torch.isfinite(nearest(weight, resolve("W4A16").args).values).all()
