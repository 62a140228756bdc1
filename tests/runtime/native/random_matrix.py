"""Random numbers and matrices for the compiled kernels, and how far from the truth they are."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.activations import ActivationRounding
from smelt.runtime.weights.matrix import Matrix
from torch import Tensor

BY_TOKEN = ActivationRounding(QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded_matrix(bits: int, outputs: int, columns: int, group: int, *, asymmetric: bool, dtype: torch.dtype) -> Matrix:
    generator = torch.Generator().manual_seed(outputs + columns)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (outputs, columns), generator=generator, dtype=torch.int8)
    scale = (torch.rand(outputs, columns // group, generator=generator) * 0.01 + 0.001).to(dtype)
    zero = torch.randint(-half, half, scale.shape, generator=generator, dtype=torch.int8) if asymmetric else None
    return Matrix(codes, f"int{bits} g{group}", bits, scale, zero)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def matrix_in_float64(matrix: Matrix) -> Tensor:
    assert matrix.scale is not None
    groups = matrix.scale.shape[1]
    codes = matrix.values.double().unflatten(1, (groups, -1))
    if matrix.zero is not None:
        codes = codes - matrix.zero.double().unsqueeze(-1)
    return (codes * matrix.scale.double().unsqueeze(-1)).flatten(1)
