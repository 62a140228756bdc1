"""What a plain linear promises besides its numbers: one copy of the weight, for few rows and for many."""

from __future__ import annotations

import pytest
import torch
from smelt.runtime.kernels.finish import is_gated
from smelt.runtime.kernels.gate_rows import gate_rows
from smelt.runtime.kernels.linear_dense import BLOCK, linear_dense, prepare
from smelt.runtime.kernels.targets import TARGETS, Target
from smelt.runtime.kernels.tile import Shape, Tile, tiles_of_target
from torch.nn import functional

from .interpreter import interpreted

TILE = Tile(64, 16, 64, 2, 4, 3, False)


@pytest.mark.parametrize("gate", ["none", "alone_relu"])
def test_a_weight_without_pairs_stays_where_it_is(gate: str) -> None:
    weight, bias = torch.randn(80, 64).half(), torch.randn(80).half()
    kept = prepare(weight, bias, gate)
    assert kept.weight.data_ptr() == weight.data_ptr()
    assert kept.bias is not None
    assert kept.bias.data_ptr() == bias.data_ptr()
    assert kept.nbytes == weight.nbytes + bias.nbytes
    assert kept.outputs == 80


@interpreted
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "alone_relu", "alone_silu", "alone_gelu", "alone_gelu_tanh"])
def test_the_same_memory_serves_many_rows_by_torch(gate: str) -> None:
    weight = prepare(torch.randn(96, 64).half() / 8, torch.randn(96).half(), gate)
    x = torch.randn(5, 64).half()
    by_torch = gate_rows(functional.linear(x, weight.weight, weight.bias), gate)
    found = linear_dense(x, weight, TILE)
    assert found.shape == (5, 48 if is_gated(gate) else 96)
    # Torch rounds sums to float16 before they are activated.
    torch.testing.assert_close(found, by_torch, atol=1e-2, rtol=1e-2)


@interpreted
@pytest.mark.parametrize("gate", ["silu", "alone_relu", "alone_gelu"])
def test_what_is_no_number_stays_none(gate: str) -> None:
    x = torch.randn(3, 64).half()
    x[1, 40] = float("nan")
    found = linear_dense(x, prepare(torch.randn(64, 64).half() / 8, gate=gate), TILE)
    assert found.isnan().all(1).tolist() == [False, True, False]
    assert gate_rows(x, gate).isnan().any(1).tolist() == [False, True, False]


def test_no_rows_give_none() -> None:
    empty = torch.empty(0, 64).half()
    assert linear_dense(empty, prepare(torch.randn(96, 64).half(), gate="silu"), TILE).shape == (0, 48)
    assert gate_rows(empty, "silu").shape == (0, 32)


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ValueError, match=r"gate 'selu' is not known; known: none, silu, gelu_tanh, alone_relu"):
        is_gated("selu")
    with pytest.raises(ValueError, match=r"a weight of torch\.float32; the kernel takes 16-bit floats"):
        prepare(torch.randn(16, 16))
    with pytest.raises(ValueError, match="a gate and its inputs are 24 rows; kernels take multiples of 16"):
        prepare(torch.randn(24, 16).half(), gate="silu")
    weight = prepare(torch.randn(16, 16).half())
    for wrong in (torch.randn(2, 8).half(), torch.randn(2, 16).bfloat16(), torch.randn(16, 2).half().T):
        with pytest.raises(ValueError, match="for a weight of 16 columns"):
            linear_dense(wrong, weight, TILE)
    for x, gate in ((torch.randn(2, 20).half(), "silu"), (torch.randn(2, 16).half(), "none")):
        with pytest.raises(ValueError, match=f"gate '{gate}'"):
            gate_rows(x, gate)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64])
def test_shipped_tiles_serve_any_size(target: Target, rows: int) -> None:
    for outputs, columns in ((48, 80), (4096, 14336), (28672, 4096), (128256, 4096)):
        tile = tiles_of_target(target).find("linear_dense", "half", Shape(rows, outputs, columns, columns, 16), BLOCK)
        assert tile.rows >= min(8, rows)
        assert tile.stages * tile.step * 2 * (tile.outputs + tile.rows) <= target.shared
        assert target.splits or tile.split == 1
