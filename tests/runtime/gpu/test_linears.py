"""A decoder whose linears are Triton kernels, in the interpreter, beside the plain one that is tested against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.compress import Recipe, run
from smelt.quant.activations import ActivationRounding
from smelt.quant.scheme_names import SUPPORTED
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.gpu.linears import BytesLinear, PackedLinear, on_kernels
from smelt.runtime.kernels.tiles.tile import tiles_of
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.runtime.weights.matrix import Matrix

from ..drive import logits_in_pieces
from ..kernels.interpreter import interpreted

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]
CPU = torch.device("cpu")
PROMPT = torch.randint(4, 4096, (40,), generator=torch.Generator().manual_seed(0)).tolist()
PIECES = [[(0, 39)], [(0, 1)]]
DRAW = torch.Generator().manual_seed(3)
SIZE = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "num_hidden_layers": 1}
FIXED = ActivationRounding(QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False), torch.tensor([0.02]).half())
BY_TOKEN = ActivationRounding(QuantizationArgs(num_bits=8, strategy="token", dynamic=True))
REPORTED = {
    "W8A8": "int8 inputs by token",
    "FP8_DYNAMIC": "e4m3 inputs by token",
    "FP8_BLOCK": "e4m3 inputs by 128 of them",
}


def _is_weight_only(scheme: str) -> bool:
    return scheme.endswith("A16") and scheme not in ("W8A16", "W2A16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        *(
            # The kernels have cases of their own, of each format.
            ("llama", scheme)
            for scheme in SUPPORTED
            if scheme in REPORTED or _is_weight_only(scheme)
        ),
        ("mixtral", "W4A16"),
        ("mixtral", "FP8_DYNAMIC"),
        ("gemma2", "W8A16"),
    ],
)
def test_a_checkpoint_computes_what_it_does_without_kernels(
    architecture: str, scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    group = {"group_size": 64} if scheme.endswith("A16") and scheme[0] == "W" and scheme != "W8A16" else {}
    path = tiny(architecture, torch.bfloat16, **SIZE)
    made = run(recipe(path, {"evaluate": False}, scheme=scheme, **group, rounding="nearest"), progress=False)
    expected = logits_in_pieces(made.checkpoint, [PROMPT], PIECES, Operators(torch.float32))[0]
    operators = GpuOperators(torch.float16, CPU)
    found = logits_in_pieces(made.checkpoint, [PROMPT], PIECES, operators)[0]
    # Inputs that are rounded once more become other codes now and then, which a random model magnifies; the next test
    # compares what each linear makes of the same inputs.
    allowed = 0.1 if scheme in REPORTED else 1e-2
    assert (found - expected).norm() <= allowed * expected.norm()
    explanations = {
        role: linear.explain() for role, linear in Model(Checkpoint(made.checkpoint), operators).linears().items()
    }
    assert explanations.pop("head").startswith("Triton linear_dense, float16")
    for role, explanation in explanations.items():
        assert explanation.startswith("Triton linear_"), role
        assert REPORTED.get(scheme, "float16 inputs") in explanation
        assert ("of the gate" in explanation) == (role.endswith("gate, up") and scheme != "FP8_BLOCK")
        assert ("all experts in one launch" in explanation) == ("expert" in role)
        assert ("restored" in explanation) == (scheme not in REPORTED and "expert" not in role)


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", REPORTED)
def test_inputs_are_rounded_as_the_scheme_says(
    scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny("llama", torch.bfloat16, **SIZE)
    made = run(recipe(path, {"evaluate": False}, scheme=scheme, rounding="nearest"), progress=False)
    plain = Model(Checkpoint(made.checkpoint), Operators(torch.float32)).linears()
    for role, linear in Model(Checkpoint(made.checkpoint), GpuOperators(torch.float16, CPU)).linears().items():
        for rows in (2, 19):
            x = torch.randn(rows, linear.columns, generator=DRAW).half()
            expected = plain[role](x.float())
            if "of the gate" in linear.explain():
                gate, up = expected.chunk(2, 1)
                expected = torch.nn.functional.silu(gate) * up
            # compressed-tensors restores floats in their scales' bfloat16.
            assert (linear(x).float() - expected).norm() <= (2e-3 if scheme == "W8A8" else 6e-3) * expected.norm(), role


def _matrix(rows: int, columns: int, bits: int, groups: int, zero: bool = False) -> Matrix:
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (rows, columns), generator=DRAW).to(torch.int8)
    scale = (torch.rand(rows, groups, generator=DRAW) + 0.5).half() / 64
    zeros = torch.randint(-half, half, (rows, groups), generator=DRAW).to(torch.int8) if zero else None
    return Matrix(codes, f"int{bits}", bits, scale, zeros)


@pytest.mark.parametrize(
    "matrix",
    [
        _matrix(80, 256, 4, 4),
        _matrix(80, 256, 4, 4, zero=True),
        _matrix(80, 256, 4, 1, zero=True),
        _matrix(80, 256, 3, 1),
        _matrix(80, 256, 6, 2),
        replace(_matrix(80, 256, 4, 4), order=torch.randperm(256, generator=DRAW)),
        replace(_matrix(80, 256, 4, 4), inputs=BY_TOKEN),
        replace(_matrix(80, 256, 4, 4), inputs=FIXED),
        replace(_matrix(80, 256, 8, 1), inputs=FIXED),
    ],
    ids=[
        "int4",
        "zeros",
        "zeros by row",
        "int3 by row",
        "int6",
        "activation order",
        "int8 inputs",
        "fixed",
        "int8 fixed",
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_codes_are_multiplied_as_their_values_are(matrix: Matrix, many: bool) -> None:
    tiles = replace(tiles_of(CPU), restore_rows=4)
    bias = torch.randn(80, generator=DRAW)
    linear = on_kernels(matrix, bias, torch.float16, CPU, tiles)
    assert isinstance(linear, PackedLinear)
    x = torch.randn(5 if many else 3, 256, generator=DRAW).half()
    # As where weights have 8 bits, scales are float32: in the inputs' own type compressed-tensors rounds scales, too.
    inputs = x if matrix.inputs is None else matrix.inputs(x if matrix.inputs is FIXED else x.float())
    expected = Operators(torch.float32).linear(replace(matrix, inputs=None), bias)(inputs.float())
    assert (linear(x).float() - expected).norm() <= 2e-3 * expected.norm()
    assert "from 4 rows on restored" in linear.explain()
    assert not linear.waits


@pytest.mark.parametrize("groups", [1, 4])
def test_weights_of_which_two_of_four_are_zero_are_read_as_such(groups: int) -> None:
    matrix, tiles = _matrix(80, 256, 4, groups), tiles_of(CPU)
    dense = on_kernels(matrix, None, torch.float16, CPU, tiles)
    kept = torch.rand(80, 64, 4, generator=DRAW).argsort(-1) < 2
    pruned = replace(matrix, values=matrix.values * kept.view(80, 256))
    linear = on_kernels(pruned, None, torch.float16, CPU, tiles)
    assert isinstance(linear, PackedLinear)
    assert dense is not None
    assert "2:4 sparse" in linear.explain()
    assert "2:4 sparse" not in dense.explain()
    scales = 128 * groups * 2 if groups > 1 else 128 * 4  # a scale a row is kept in float32
    assert linear.nbytes - scales == 0.75 * (dense.nbytes - scales)
    x = torch.randn(3, 256, generator=DRAW).half()
    expected = Operators(torch.float32).linear(pruned, None)(x.float())
    assert (linear(x).float() - expected).norm() <= 2e-3 * expected.norm()
    # A row of four that has three is not such a weight.
    values = pruned.values.clone()
    values[7, :4] = torch.tensor([1, 2, 3, 0])
    assert "2:4" not in str(on_kernels(replace(pruned, values=values), None, torch.float16, CPU, tiles).explain())  # pyright: ignore


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_is_applied_in_the_same_launch(rows: int, activation: str) -> None:
    matrix, tiles = _matrix(96, 128, 4, 2), replace(tiles_of(CPU), restore_rows=4)
    linear = on_kernels(matrix, None, torch.float16, CPU, tiles, activation)
    assert linear is not None
    x = torch.randn(rows, 128, generator=DRAW).half()
    gate, up = (x.double() @ matrix.dense(torch.float64).T).chunk(2, 1)
    approximate = torch.nn.functional.gelu(gate, approximate="tanh")
    expected = (torch.nn.functional.silu(gate) if activation == "silu" else approximate) * up
    assert (linear(x).double() - expected).norm() <= 3e-3 * expected.norm()


def test_int8_by_token_is_multiplied_as_int8() -> None:
    matrix = replace(_matrix(80, 256, 8, 1), inputs=BY_TOKEN)
    linear = on_kernels(matrix, None, torch.float16, CPU, tiles_of(CPU))
    assert isinstance(linear, BytesLinear)
    for rows in (1, 20):
        x = torch.randn(rows, 256, generator=DRAW).half()
        expected = Operators(torch.float32).linear(matrix, None)(x.float())
        assert (linear(x).float() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.slow
def test_a_quantized_head_is_a_linear_like_others(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    path = tiny("llama", torch.bfloat16, **SIZE)
    made = run(recipe(path, {"evaluate": False}, ignore=[], rounding="nearest"), progress=False)
    expected = logits_in_pieces(made.checkpoint, [PROMPT], [[(0, 40)]], Operators(torch.float32))[0]
    operators = GpuOperators(torch.float16, CPU)
    found = logits_in_pieces(made.checkpoint, [PROMPT], [[(0, 40)]], operators)[0]
    assert (found - expected).norm() <= 1e-2 * expected.norm()
    assert "linear_codes, int4 g128" in Model(Checkpoint(made.checkpoint), operators).head.linear.explain()


def test_what_no_kernel_takes_is_left_to_torch() -> None:
    tiles = tiles_of(CPU)
    assert on_kernels(Matrix.plain(torch.randn(16, 32)), None, torch.float16, CPU, tiles) is None
    assert on_kernels(_matrix(16, 256, 4, 4), None, torch.float32, CPU, tiles) is None
    assert on_kernels(_matrix(16, 264, 4, 33), None, torch.float16, CPU, tiles) is None  # groups of 8
    assert on_kernels(_matrix(24, 256, 4, 4), None, torch.float16, CPU, tiles, "silu") is None


def test_tensor_cores_without_8_bit_floats_multiply_them_as_16_bit_ones() -> None:
    from smelt.runtime.kernels.base.targets import TARGETS
    from smelt.runtime.weights.matrix import FloatCodes

    values = torch.randn(64, 256, generator=DRAW).to(torch.float8_e4m3fn)
    inputs = ActivationRounding(QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True))
    scale = torch.rand(64, 1, generator=DRAW).bfloat16()
    matrix = replace(Matrix.plain(values.bfloat16() * scale, inputs), floats=FloatCodes(values, scale))
    tiles = replace(tiles_of(CPU), target=TARGETS["sm_80"])
    linear = on_kernels(matrix, None, torch.float16, CPU, tiles)
    assert isinstance(linear, PackedLinear)
    x = torch.randn(2, 256, generator=DRAW).half()
    expected = Operators(torch.float32).linear(matrix, None)(x.float())
    assert (linear(x).float() - expected).norm() <= 1e-2 * expected.norm()
    assert "inputs rounded to float8" in linear.explain()


def test_blocks_that_do_not_fill_their_rows_are_multiplied_row_by_row(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    # Keys and values have 64 rows each, so a block of 128 would hold both.
    path = tiny("llama", torch.bfloat16, **SIZE | {"num_key_value_heads": 2})
    made = run(recipe(path, {"evaluate": False}, scheme="FP8_BLOCK", rounding="nearest"), progress=False)
    role = "layer 0 query, key, value"
    # In float32: rounding inputs to 8 bits in 16-bit arithmetic moves some across the border of two codes.
    exact = Model(Checkpoint(made.checkpoint), Operators(torch.float32)).linears()[role]
    linear = Model(Checkpoint(made.checkpoint), GpuOperators(torch.float16, CPU)).linears()[role]
    assert isinstance(linear, PackedLinear)
    x = torch.randn(3, 256, generator=DRAW).half()
    expected = exact(x.float())
    assert (linear(x) - expected).norm() <= 3e-3 * expected.norm()


@pytest.mark.parametrize("inputs", [None, BY_TOKEN])
def test_a_step_may_need_no_rows(inputs: ActivationRounding | None) -> None:
    """A piece of a prompt that is not its last asks the head for nothing."""
    linear = on_kernels(replace(_matrix(80, 256, 8, 1), inputs=inputs), None, torch.float16, CPU, tiles_of(CPU))
    assert linear is not None
    assert linear(torch.empty(0, 256).half()).shape == (0, 80)
