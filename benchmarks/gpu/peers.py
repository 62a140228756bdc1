"""The same products by torch's own operators and by gemlite, on as many weights as they are given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from smelt.runtime.kernels.rows.quantize_rows import divided_by
from torch import Tensor
from torch.nn import functional

GROUP = 128
Calls = list[Callable[[], object]]
F8_LIMIT = 448.0


def bf16(x: Tensor, outputs: int, copies: int) -> Calls:
    """torch's bfloat16 linear."""
    weights = [_weight(x, outputs) for _ in range(copies)]
    return [lambda w=w: functional.linear(x, w) for w in weights]


def torch_int4(x: Tensor, outputs: int, copies: int) -> Calls:
    """torch's int4 product of groups of 128."""
    columns = x.shape[1]
    packed, scales = [], []
    for _ in range(copies):
        nibbles = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8, device=x.device)
        packed.append(torch.ops.aten._convert_weight_to_int4pack(nibbles, 8))
        scales.append(torch.rand(columns // GROUP, outputs, 2, dtype=torch.bfloat16, device=x.device))
    return [
        lambda w=w, s=s: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, s) for w, s in zip(packed, scales, strict=True)
    ]


def gemlite_int4(x: Tensor, outputs: int, copies: int) -> Calls:
    """gemlite's int4 product of groups of 128, with the tiles that it ships."""
    from gemlite.core import DType, GemLiteLinearTriton  # pyright: ignore[reportMissingImports]

    columns = x.shape[1]
    layers = []
    for _ in range(copies):
        codes = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8, device=x.device)
        scales = torch.rand(outputs, columns // GROUP, dtype=torch.bfloat16, device=x.device)
        zeros = torch.full_like(scales, 8.0)
        layer = GemLiteLinearTriton(4, GROUP, columns, outputs, DType.BF16, DType.BF16)
        layer.pack(codes, scales, zeros, None)
        layers.append(layer)
    return [lambda layer=layer: layer(x) for layer in layers]


def torch_fp8(x: Tensor, outputs: int, copies: int) -> Calls:
    """torch's e4m3 product with a scale a row and a scale an output, its inputs rounded before."""
    scale = divided_by(x.float().abs().amax(1, keepdim=True), F8_LIMIT)
    codes = (x.float() / scale).to(torch.float8_e4m3fn)
    weights = [_weight(x, outputs).to(torch.float8_e4m3fn).t() for _ in range(copies)]
    scales = torch.rand(1, outputs, device=x.device)
    return [lambda w=w: torch.ops.aten._scaled_mm(codes, w, scale, scales, out_dtype=torch.bfloat16) for w in weights]


def torch_int8(x: Tensor, outputs: int, copies: int) -> Calls:
    """torch's int8 product, its inputs rounded before; the sums are not scaled."""
    codes = torch.randint(-127, 128, x.shape, dtype=torch.int8, device=x.device)
    weights = [
        torch.randint(-127, 128, (outputs, x.shape[1]), dtype=torch.int8, device=x.device).t() for _ in range(copies)
    ]
    return [lambda w=w: torch.ops.aten._int_mm(codes, w) for w in weights]


def torch_sparse(x: Tensor, outputs: int, copies: int) -> Calls:
    """torch's 2:4 sparse bfloat16 linear."""
    weights = []
    for _ in range(copies):
        dense = _weight(x, outputs)
        dense.view(outputs, -1, 4)[..., :2] = 0
        weights.append(torch.sparse.to_sparse_semi_structured(dense))
    return [lambda w=w: functional.linear(x, w) for w in weights]


def _weight(x: Tensor, outputs: int) -> Tensor:
    return torch.randn(outputs, x.shape[1], dtype=torch.bfloat16, device=x.device)
