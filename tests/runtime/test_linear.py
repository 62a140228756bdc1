"""What computes linears, against float64."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.activations import rounded_inputs
from smelt.runtime.cpu import Int8Linear
from smelt.runtime.matrix import Matrix
from smelt.runtime.operators import Operators

BY_TOKEN = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)


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
    expected = (
        rounded_inputs(x.float(), BY_TOKEN).double() @ (codes.double() * scale.double()).T + bias.to(dtype).double()
    )
    torch.testing.assert_close(
        module(x).double(),
        expected,
        rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-2 if dtype == torch.bfloat16 else 1e-5,
    )


def test_inputs_that_are_not_numbers_stay_so() -> None:
    matrix = Matrix(torch.ones(8, 16, dtype=torch.int8), "int8", 8, torch.ones(8, 1), None, BY_TOKEN)
    module = Operators(torch.float32).linear(matrix, None)
    x = torch.ones(3, 16)
    x[1, 4] = float("nan")
    found = module(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
