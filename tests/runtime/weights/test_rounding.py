"""Rounding with fixed scales, beside compressed-tensors' own code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from smelt.quant.activations import ActivationRounding
from smelt.runtime.weights.rounding import FixedRounding, alike, described

NUMBERS = {
    "int8": {"num_bits": 8, "type": "int", "symmetric": True},
    "int8 and zero-point": {"num_bits": 8, "type": "int", "symmetric": False},
    "int4": {"num_bits": 4, "type": "int", "symmetric": True},
    "float8": {"num_bits": 8, "type": "float", "symmetric": True},
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_what_compressed_tensors_computes(numbers: str, strategy: str, dtype: torch.dtype) -> None:
    args = QuantizationArgs(**NUMBERS[numbers], strategy=strategy, dynamic=False)
    x = (3 * torch.randn(2, 4, 50, 16, generator=torch.Generator().manual_seed(0))).to(dtype)
    x[0, 0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    shape = (1,) if strategy == "tensor" else (4, 1, 1)
    rounding = ActivationRounding.observed(
        args, torch.full(shape, -5.0), torch.linspace(3, 7, 4)[: shape[0]].view(shape), dtype
    )
    expected = fake_quantize(x, rounding.scale, rounding.zero, args)
    found = FixedRounding(rounding, dtype)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[x.isfinite()].unique().numel() > 10
    # What is computed without a value being there is waited for by nobody.
    assert FixedRounding(rounding, dtype, torch.device("meta"))(x.to("meta")).shape == x.shape


def test_what_is_rounded_alike() -> None:
    fixed = QuantizationArgs(**NUMBERS["int8"], strategy="tensor", dynamic=False)
    one = ActivationRounding(fixed, torch.tensor([0.5]))
    token = ActivationRounding(QuantizationArgs(**NUMBERS["int8"], strategy="token", dynamic=True))
    assert alike(None, None)
    assert alike(one, ActivationRounding(fixed, torch.tensor([0.5])))
    assert alike(token, replace(token))
    for other in (None, token, ActivationRounding(fixed, torch.tensor([0.25])), replace(one, zero=torch.tensor([1]))):
        assert not alike(one, other)
        assert not alike(other, one)
    assert described(one) == "int8 with a fixed scale"
    assert described(token) == "int8"
