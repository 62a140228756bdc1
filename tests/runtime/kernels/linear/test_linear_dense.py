"""What a plain linear promises besides its numbers: one copy of the weight, for few rows, for many and for all experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.gpu.linears import DenseGpuLinear
from smelt.runtime.kernels.base.targets import TARGETS, Target
from smelt.runtime.kernels.linear.finish import is_gated
from smelt.runtime.kernels.linear.gate_rows import gate_rows
from smelt.runtime.kernels.linear.linear_dense import BLOCK, DenseWeight, linear_dense, prepare
from smelt.runtime.kernels.tiles.tile import LinearShape, Tile, tiles_of, tiles_of_target
from smelt.runtime.weights.matrix import Matrix
from torch.nn import functional

from ..interpreter import interpreted

TILE = Tile(64, 16, 64, 2, 4, 3, False)
CPU = torch.device("cpu")


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


@interpreted
@pytest.mark.parametrize("columns", [64, 72])
def test_a_gate_is_applied_whether_the_kernel_takes_the_columns_or_not(columns: int) -> None:
    matrix = Matrix.plain(torch.randn(96, columns).half() / 8)
    linear = DenseGpuLinear(matrix, None, torch.float16, CPU, tiles_of(CPU), "silu")
    assert linear.groups == (columns == 64)
    x = torch.randn(3, columns).half()
    gate, up = (x.double() @ matrix.values.double().T).chunk(2, 1)
    torch.testing.assert_close(linear(x).double(), functional.silu(gate) * up, atol=1e-2, rtol=1e-2)


def _experts(count: int, rows: int, columns: int, stored: str) -> list[Matrix]:
    """Plain ones, or codes in groups of 8, which no kernel takes."""
    if stored == "plain":
        return [Matrix.plain(torch.randn(rows, columns).half() / columns**0.5) for _ in range(count)]
    return [
        Matrix(
            torch.randint(-8, 8, (rows, columns), dtype=torch.int8),
            "int4",
            4,
            (torch.rand(rows, columns // 8) + 0.5).half() / (5 * columns**0.5),
        )
        for _ in range(count)
    ]


@interpreted
@pytest.mark.parametrize("stored", ["plain", "int4"])
def test_experts_that_are_computed_plainly_are_computed_together(stored: str) -> None:
    first, second = _experts(3, 96, 64, stored), _experts(3, 64, 48, stored)
    experts = GpuOperators(torch.float16, CPU).experts(first, second, "silu")
    assert experts is not None
    x, chosen, shares = torch.randn(5, 64).half(), torch.rand(5, 3).argsort(-1)[:, :2], torch.rand(5, 2).half()
    expected = torch.zeros(5, 64, dtype=torch.float64)
    for token, place in torch.cartesian_prod(torch.arange(5), torch.arange(2)).tolist():
        expert = int(chosen[token, place])
        gate, up = (first[expert].dense(torch.float64) @ x[token].double()).chunk(2)
        found = second[expert].dense(torch.float64) @ (functional.silu(gate) * up)
        expected[token] += shares[token, place].double() * found
    found = experts(x, chosen, shares)
    assert (found - expected).norm() <= 3e-3 * expected.norm()
    explanations = {linear.explain() for linear in experts.linears().values()}
    how = "Triton linear_dense, float16" + (", stored as int4" if stored == "int4" else "")
    assert explanations == {
        f"{how}, then silu of the gate, all experts in one launch",
        f"{how}, all experts in one launch",
    }
    assert sum(linear.nbytes for linear in experts.linears().values()) == 3 * 2 * (96 * 64 + 64 * 48)


def test_no_rows_give_none() -> None:
    empty = torch.empty(0, 64).half()
    assert linear_dense(empty, prepare(torch.randn(96, 64).half(), gate="silu"), TILE).shape == (0, 48)
    assert gate_rows(empty, "silu").shape == (0, 32)


def test_what_is_impossible_is_reported() -> None:
    with pytest.raises(ValueError, match=r"unknown gate 'selu'; known: none, silu, gelu_tanh, alone_relu"):
        is_gated("selu")
    with pytest.raises(ValueError, match=r"a weight of torch\.float32; the kernel takes 16-bit floats"):
        prepare(torch.randn(16, 16))
    with pytest.raises(ValueError, match="a fused gate has 24 rows; kernels take multiples of 16"):
        prepare(torch.randn(24, 16).half(), gate="silu")
    weight = prepare(torch.randn(16, 16).half())
    for wrong in (torch.randn(2, 8).half(), torch.randn(16, 2).half().T):
        with pytest.raises(ValueError, match="for a weight of 16 columns"):
            linear_dense(wrong, weight, TILE)
    with pytest.raises(ValueError, match=r"inputs are torch\.bfloat16 for a weight of torch\.float16"):
        linear_dense(torch.randn(2, 16).bfloat16(), weight, TILE)
    plain = prepare(torch.randn(32, 16).half())
    for other in (weight, replace(plain, gate="silu"), prepare(torch.randn(32, 16).bfloat16())):
        with pytest.raises(ValueError, match="experts must all be stored alike"):
            DenseWeight.joined([plain, other])
    with pytest.raises(ValueError, match="experts with biases are not supported"):
        DenseWeight.joined([plain, replace(plain, bias=torch.zeros(32).half())])
    for x, gate in ((torch.randn(2, 20).half(), "silu"), (torch.randn(2, 16).half(), "none")):
        with pytest.raises(ValueError, match=f"gate '{gate}'"):
            gate_rows(x, gate)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64])
def test_shipped_tiles_serve_any_size(target: Target, rows: int) -> None:
    for outputs, columns in ((48, 80), (4096, 14336), (28672, 4096), (128256, 4096)):
        tile = tiles_of_target(target).find(
            "linear_dense", "half", LinearShape(rows, outputs, columns, columns, 16), BLOCK
        )
        assert tile.rows >= min(8, rows)
        assert tile.stages * tile.step * 2 * (tile.outputs + tile.rows) <= target.shared
        assert target.splits or tile.split == 1
