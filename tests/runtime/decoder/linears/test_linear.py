"""What computes linears, against float64."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.activations import ActivationRounding
from smelt.runtime.decoder.linears import cpu
from smelt.runtime.decoder.linears.cpu import Int8Linear
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.weights.matrix import Matrix

BY_TOKEN = ActivationRounding(QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True))
FIXED = ActivationRounding(
    QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor", dynamic=False), torch.tensor([0.01])
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 64, 32), (5, 96, 200), (70, 33, 1024)])
def test_int8_is_what_the_rounded_product_is(dtype: torch.dtype, rows: int, outputs: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (outputs, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(outputs, 1, generator=generator) * 1e-2
    bias = torch.randn(outputs, generator=generator)
    x = (torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)).to(dtype)
    x[0] = 0
    module = Operators(dtype).linear(Matrix(codes, "int8", 8, scale, None, BY_TOKEN), bias)
    assert isinstance(module, Int8Linear)
    expected = BY_TOKEN(x.float()).double() @ (codes.double() * scale.double()).T + bias.to(dtype).double()
    torch.testing.assert_close(
        module(x).double(),
        expected,
        rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-2 if dtype == torch.bfloat16 else 1e-5,
    )


def test_int8_is_the_same_in_halves_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where products of whole bytes are wrong, which is so on processors without VNNI."""
    monkeypatch.setattr(cpu, "_takes_bytes", lambda: False)
    test_int8_is_what_the_rounded_product_is(torch.float32, 5, 96, 200)
    test_int8_with_a_fixed_scale(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_with_a_fixed_scale(dtype: torch.dtype) -> None:
    """Codes are those of compressed-tensors in the same type; their products are exact."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (33, 200), generator=generator, dtype=torch.int8)
    scale = torch.rand(33, 1, generator=generator) * 1e-2
    x = (2 * torch.randn(7, 200, generator=generator)).to(dtype)
    fixed = ActivationRounding(FIXED.args, torch.tensor([0.017], dtype=dtype))
    module = Operators(dtype).linear(Matrix(codes, "int8", 8, scale, None, fixed), None)
    assert isinstance(module, Int8Linear)
    assert "inputs rounded to int8 with a fixed scale" in module.explain()
    whole = (fixed(x).double() / fixed.scale.double()).round()
    expected = (whole @ codes.double().T) * scale.double().T * fixed.scale.double()
    torch.testing.assert_close(module(x).double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("inputs", [BY_TOKEN, FIXED], ids=["by token", "fixed"])
def test_inputs_that_are_not_numbers_stay_so(inputs: ActivationRounding) -> None:
    matrix = Matrix(torch.ones(8, 16, dtype=torch.int8), "int8", 8, torch.ones(8, 1), None, inputs)
    module = Operators(torch.float32).linear(matrix, None)
    x = torch.ones(3, 16)
    x[1, 4] = float("nan")
    found = module(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
