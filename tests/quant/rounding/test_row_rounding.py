"""Scales computed for each row: compressed-tensors' codes, and no code that hangs on the last bit of a quotient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.activations import ActivationRounding
from smelt.quant.row_rounding import RowRounding
from torch import Tensor

WIDTH = 32
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _args(bits: int, numbers: str = "int", group: int = WIDTH) -> QuantizationArgs:
    settings: dict[str, Any] = {"strategy": "group", "group_size": group, "symmetric": True, "dynamic": True}
    return QuantizationArgs(num_bits=bits, type=numbers, **settings)  # type: ignore[arg-type]


def _rows(dtype: torch.dtype) -> Tensor:
    rows = (3 * torch.randn(400, 4, WIDTH, generator=torch.Generator().manual_seed(0))).to(dtype)
    rows[0, 0] = 0
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "numbers"), [(4, "int"), (8, "int"), (8, "float")])
@pytest.mark.parametrize("group", [WIDTH, WIDTH // 2])
def test_all_but_negative_extremes_are_those_of_compressed_tensors(
    bits: int, numbers: str, group: int, dtype: torch.dtype
) -> None:
    args, rows = _args(bits, numbers, group), _rows(dtype)
    found, expected = RowRounding(args)(rows), ActivationRounding(args)(rows)
    groups = rows.unflatten(-1, (-1, group))
    on_the_edge = (groups == -groups.abs().amax(-1, keepdim=True)).view_as(rows) & (rows != 0)
    kept = torch.ones_like(on_the_edge) if numbers == "float" else ~on_the_edge
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_negative_extreme_gets_what_its_exact_quotient_rounds_to(bits: int, dtype: torch.dtype) -> None:
    """Exactly it is minus half of the range of codes, which is half of an odd number: between two codes, half to even."""
    rows = _rows(dtype)[1:]
    least = rows.argmin(-1, keepdim=True)
    rows.scatter_(-1, least, -1.5 * rows.abs().amax(-1, keepdim=True))
    exact = round(-(2**bits - 1) / 2)  # Python rounds halves to even
    codes, _ = RowRounding(_args(bits)).parts(rows)
    assert (codes.gather(-1, least) == exact).all()
    # A neighbouring number, as another order of sums would leave it, gets the same code.
    codes, _ = RowRounding(_args(bits)).parts(torch.nextafter(rows, torch.full_like(rows, -torch.inf)))
    assert (codes.gather(-1, least) == exact).all()
