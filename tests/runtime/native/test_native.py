"""The compiled kernels against float64, where this machine can compile and run them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.compress import config_for
from smelt.quant.activations import ActivationRounding
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.attention import attend
from smelt.runtime.decoder.parts.batch import Batch, Run
from smelt.runtime.decoder.parts.kv_cache import PagedKeysValues
from smelt.runtime.decoder.parts.operators import Heads, Operators
from smelt.runtime.native.linears import CodesLinear, NativeDenseLinear
from smelt.runtime.native.operators import NativeAttention, NativeOperators
from smelt.runtime.weights.cache_scheme import CacheScheme
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.runtime.weights.matrix import Matrix
from transformers import AutoModelForCausalLM

from ...tiny import make_model, save_model
from ..decoder.test_architectures import VARIANTS
from ..drive import logits_in_pieces
from ..weights.test_cache_scheme import SCHEMES
from .random_matrix import BY_TOKEN, coded_matrix, matrix_in_float64, randn, relative_error


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "group"), [(256, 32), (384, 128), (200, 8), (200, 200)])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_codes(compiled: ModuleType, bits: int, columns: int, group: int, asymmetric: bool, dtype: torch.dtype) -> None:
    matrix = coded_matrix(bits, 75, columns, group, asymmetric=asymmetric, dtype=dtype)
    bias = randn(75, seed=1)
    weight = matrix_in_float64(matrix)
    assert CodesLinear.takes(matrix)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 21):
        x = randn(rows, columns, seed=rows).bfloat16()
        expected = x.double() @ weight.T + bias.bfloat16().double()
        # Rounding the result alone costs up to 2^-9. Int8 inputs are off by up to a 255th of their group's largest.
        assert relative_error(CodesLinear(compiled, matrix, bias, exact=True)(x), expected) < 0.003
        assert relative_error(CodesLinear(compiled, matrix, bias, exact=False)(x), expected) < 0.015


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, 32, 128])
def test_sums_of_the_largest_codes_and_inputs(compiled: ModuleType, bits: int, group: int) -> None:
    """Products may be added up in 16 bits as long as they fit."""
    half = 1 << (bits - 1)
    codes = torch.tensor([half - 1, -half], dtype=torch.int8)[:, None].expand(2, 256).repeat(20, 1)
    matrix = Matrix(codes, f"int{bits} g{group}", bits, torch.ones(40, 256 // group))
    x = torch.tensor([1.0, -1.0]).repeat(4)[:, None].expand(8, 256).bfloat16()
    expected = x.double() @ codes.double().T
    linears = [CodesLinear(compiled, matrix, None, exact=exact, few_exact=exact) for exact in (False, True)]
    if bits == 8:
        linears.append(CodesLinear(compiled, matrix, None, exact=False, few_exact=False, planes=True))
    for linear in linears:
        for rows in range(1, 9):
            assert relative_error(linear(x[:rows]), expected[:rows]) < 0.01


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("outputs", [150, 128, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_codes_do_not_depend_on_each_other(
    compiled: ModuleType, bits: int, asymmetric: bool, outputs: int, dtype: torch.dtype
) -> None:
    """Few are multiplied by two tiles of outputs at a time, which are not always there."""
    matrix = coded_matrix(bits, outputs, 256, 64, asymmetric=asymmetric, dtype=dtype)
    bias, x = randn(outputs, seed=1), randn(21, 256, seed=2).bfloat16()
    linears = [CodesLinear(compiled, matrix, bias, exact=False, few_exact=False)]
    if bits == 8 and not asymmetric:
        planes = CodesLinear(compiled, matrix, bias, exact=False, few_exact=False, planes=True)
        upper = planes.upper()
        assert upper is not None
        linears += [planes, upper]
    for linear in linears:
        found = linear(x)
        for rows in range(1, 18):
            assert torch.equal(linear(x[:rows]), found[:rows])
            assert torch.equal(linear(x[-rows:]), found[-rows:])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(320, 320), (2048, 128)])
def test_more_rows_than_a_tile_is_read_for(
    compiled: ModuleType, bits: int, exact: bool, columns: int, group: int
) -> None:
    matrix = coded_matrix(bits, 75, columns, group, asymmetric=False, dtype=torch.bfloat16)
    x = randn(211, columns, seed=2).bfloat16()
    linears = [CodesLinear(compiled, matrix, None, exact=exact, few_exact=exact)]
    if bits == 8:
        planes = CodesLinear(compiled, matrix, None, exact=exact, few_exact=exact, planes=True)
        upper = planes.upper()
        assert upper is not None
        linears += [planes, upper]
    if group == columns:  # inputs have one scale for a row, however long it is
        linears.append(CodesLinear(compiled, replace(matrix, inputs=BY_TOKEN), None, exact))
    for linear in linears:
        by_row = torch.cat([linear(row) for row in x.split(1)])
        assert torch.equal(linear(x), by_row)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_inputs_of_few_rows_are_exact_down_to_a_64th_of_the_largest(
    compiled: ModuleType, bits: int, asymmetric: bool
) -> None:
    matrix = coded_matrix(bits, 75, 128, 128, asymmetric=asymmetric, dtype=torch.bfloat16)
    matrix = replace(matrix, scale=torch.full((75, 1), 0.25).bfloat16())
    weight = matrix_in_float64(matrix)
    linear, all_rows = CodesLinear(compiled, matrix, None, exact=False), CodesLinear(compiled, matrix, None, exact=True)
    magnitudes = torch.rand(40, 128, generator=torch.Generator().manual_seed(1)) * 63 + 1
    factors = torch.logspace(-30, 30, 40)
    factors[20] = 1
    x = (magnitudes * randn(40, 128, seed=2).sign() * factors.unsqueeze(1)).bfloat16()
    x[20, 3] = 127.5  # all bits of its mantissa are ones
    expected = x.double() @ weight.T
    assert torch.equal(all_rows(x), expected.bfloat16())
    for first in range(0, 40, 2):
        assert torch.equal(linear(x[first : first + 2]), expected[first : first + 2].bfloat16())
    # Smaller ones are rounded: to the nearest multiple of at most a 16,320th of the largest.
    x[:, 5] *= 1000
    expected, largest = x.double() @ weight.T, x.double().abs().amax(-1, keepdim=True)
    bound = largest / 32640 * weight.abs().sum(-1) + expected.abs() / 2**8
    assert ((all_rows(x).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_long_rows_by_two_tiles(
    compiled: ModuleType, monkeypatch: pytest.MonkeyPatch, bits: int, asymmetric: bool
) -> None:
    """An odd number of tiles, the last one not whole; on more threads there are too few pairs, and each tile is alone."""
    matrix = coded_matrix(bits, 270, 4096, 128, asymmetric=asymmetric, dtype=torch.bfloat16)
    bias, weight = randn(270, seed=1), matrix_in_float64(matrix)
    rounded = CodesLinear(compiled, matrix, bias, exact=False, few_exact=False)
    linear = CodesLinear(compiled, matrix, bias, exact=True)
    x = randn(17, 4096, seed=2).bfloat16()
    expected = x.double() @ weight.T + bias.bfloat16().double()
    alone = linear(x)
    all_rows = rounded(x)
    assert relative_error(alone, expected) < 0.003
    assert relative_error(all_rows, expected) < 0.015
    for threads in (1, 2, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows in range(1, 9):
            assert torch.equal(linear(x[:rows]), alone[:rows])
            assert torch.equal(rounded(x[:rows]), all_rows[:rows])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_columns_in_activation_order(compiled: ModuleType, rows: int) -> None:
    matrix = coded_matrix(4, 75, 256, 32, asymmetric=True, dtype=torch.bfloat16)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    linear = CodesLinear(compiled, replace(matrix, order=order), None, exact=False)
    x = randn(rows, 256, seed=rows).bfloat16()
    weight = torch.empty(75, 256, dtype=torch.float64)
    weight[:, order] = matrix_in_float64(matrix)
    assert relative_error(linear(x), x.double() @ weight.T) < 0.015


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_int8_by_token_is_the_rounded_product(compiled: ModuleType, rows: int) -> None:
    codes = torch.randint(-128, 128, (96, 1024), generator=torch.Generator().manual_seed(rows), dtype=torch.int8)
    matrix = Matrix(codes, "int8", 8, torch.full((96, 1), 0.01), None, BY_TOKEN)
    x = (randn(rows, 1024) * randn(rows, 1, seed=2)).bfloat16()
    x[0] = 0
    expected = BY_TOKEN(x.float()).double() @ matrix_in_float64(matrix).T
    torch.testing.assert_close(
        CodesLinear(compiled, matrix, None, exact=False)(x).double(), expected, rtol=1e-2, atol=2e-2
    )


@pytest.mark.parametrize(("bits", "columns", "group"), [(8, 256, 256), (8, 1024, 128), (4, 256, 32), (3, 200, 200)])
def test_int8_with_a_fixed_scale_is_what_compressed_tensors_rounds_to(
    compiled: ModuleType, bits: int, columns: int, group: int
) -> None:
    """Every code, in bfloat16's arithmetic: a row of a unit matrix gives one of them back."""
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor", dynamic=False)
    fixed = ActivationRounding(args, torch.tensor([0.019], dtype=torch.bfloat16))
    matrix = replace(coded_matrix(bits, 75, columns, group, asymmetric=False, dtype=torch.bfloat16), inputs=fixed)
    linear = CodesLinear(compiled, matrix, None, exact=False)
    assert "inputs rounded to int8 with a fixed scale" in linear.explain()
    unit = Matrix(torch.eye(columns, dtype=torch.int8), "int8", 8, torch.ones(columns, 1), None, fixed)
    for rows in (1, 3, 21):
        x = (2 * randn(rows, columns, seed=rows)).bfloat16()
        x[0, :2] = torch.tensor([float("inf"), -float("inf")])
        assert torch.equal(CodesLinear(compiled, unit, None, exact=False)(x), fixed(x))
        assert fixed.scale is not None
        whole = (fixed(x).double() / fixed.scale.double()).round() * fixed.scale.double()
        assert relative_error(linear(x), whole @ matrix_in_float64(matrix).T) < 0.003
        tiled = torch.empty(rows, 75, dtype=torch.bfloat16)
        if compiled.linear_tiles(linear.handle, x.data_ptr(), rows, tiled.data_ptr(), 2):
            assert torch.equal(tiled, linear(x))
        x[0, 5] = float("nan")
        assert linear(x)[0].isnan().all()


def test_extreme_inputs(compiled: ModuleType) -> None:
    matrix = coded_matrix(4, 40, 256, 128, asymmetric=False, dtype=torch.bfloat16)
    module = CodesLinear(compiled, matrix, None, exact=False)
    x = randn(6, 256).bfloat16()
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    x[3] = 0
    x[4] *= 1e30
    for rows in (x, x[1:2], x[1:3]):
        assert (~module(rows).isfinite()).any(-1).tolist() == (~rows.isfinite()).any(-1).tolist()
    assert not module(x)[3].any()
    assert relative_error(module(x)[4:5], x[4:5].double() @ matrix_in_float64(matrix).T) < 0.01


@pytest.mark.parametrize(("outputs", "columns"), [(101, 72), (64, 256), (3, 8), (130, 2049), (20, 8200)])
def test_dense(compiled: ModuleType, outputs: int, columns: int) -> None:
    weight, bias = randn(outputs, columns).bfloat16(), randn(outputs, seed=1).bfloat16()
    for rows in (0, 1, 2, 3, 5, 8, 31, 33):
        x = randn(rows, columns, seed=2).bfloat16()
        found = NativeDenseLinear(compiled, weight, bias, "")(x)
        expected = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize(("outputs", "columns"), [(7, 31), (13, 2048), (50, 4133), (1023, 2081), (13, 16455)])
def test_dense_rows_do_not_depend_on_each_other(compiled: ModuleType, outputs: int, columns: int) -> None:
    weight, bias = randn(outputs, columns).bfloat16(), randn(outputs, seed=1).bfloat16()
    linear = NativeDenseLinear(compiled, weight, bias, "", any_rows=True)
    x = randn(300, columns, seed=2).bfloat16()
    found = linear(x)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-5)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 127, 128, 129, 131):
        assert torch.equal(linear(x[:rows]), found[:rows])
        assert torch.equal(linear(x[-rows:]), found[-rows:])


@pytest.mark.parametrize("count", [1, 17, 5000, 70_001])
def test_sums_and_float32_are_torchs(compiled: ModuleType, count: int) -> None:
    operators = NativeOperators(compiled, exact=False)
    a, b = randn(count).bfloat16(), randn(count, seed=1).bfloat16()
    a[0] = float("inf")
    assert torch.equal(operators.add(a, b), a + b)
    assert torch.equal(operators.to_float32(a), a.float())
    out = torch.empty(count)
    assert operators.to_float32(a, out) is out
    assert torch.equal(out, a.float())


@pytest.mark.parametrize("size", [8, 33, 256])
@pytest.mark.parametrize("rounds_first", [False, True])
def test_norm_and_gate(compiled: ModuleType, size: int, rounds_first: bool) -> None:
    operators, plain = NativeOperators(compiled, exact=False), Operators(torch.bfloat16)
    weight, x = randn(size).bfloat16().float(), (3 * randn(5, size, seed=1)).bfloat16()
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert relative_error(operators.rms_norm(weight, 1e-5, rounds_first)(x), wide * weight.double()) < 0.004
    torch.testing.assert_close(
        operators.rms_norm(weight, 1e-5, rounds_first)(x), plain.rms_norm(weight, 1e-5, rounds_first)(x)
    )
    both = (8 * randn(5, 2 * size, seed=2)).bfloat16()
    first, second = both.double().chunk(2, -1)
    for name, activate in (
        ("silu", torch.nn.functional.silu),
        ("gelu_pytorch_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        assert relative_error(operators.gate(name)(both), activate(first) * second) < 0.004


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("queries", "shared", "size", "window", "cap", "block"),
    [
        (4, 4, 8, None, None, 16),
        (8, 2, 64, None, None, 16),
        (7, 1, 128, 20, None, 5),
        (6, 2, 80, 3, 30.0, 32),
        (4, 2, 32, 50, 30.0, 16),
    ],
)
@pytest.mark.parametrize("tiles", [False, True])
def test_attention(
    compiled: ModuleType,
    kept: torch.dtype,
    queries: int,
    shared: int,
    size: int,
    window: int | None,
    cap: float | None,
    block: int,
    tiles: bool,
) -> None:
    """Prompts of several lengths, then some more tokens, then one each: kernels beside torch, on the same stored bits."""
    heads = Heads(queries, shared, size, size**-0.5, window, cap)
    lengths, more, blocks_each = [1, 13, 40, 100], [3, 1, 9, 17], -(-118 // block)
    longer = [a + b for a, b in zip(lengths, more, strict=True)]
    stores = [PagedKeysValues([shared] * 2, size, 4 * blocks_each, block, kept) for _ in range(2)]
    native, plain = NativeAttention(compiled, heads), Operators(torch.bfloat16).attention(heads)
    native.tiles = tiles  # or their emulation, for heads of a multiple of 32
    # Blocks lie scattered, as in a cache that has been used.
    tables = torch.randperm(4 * blocks_each, generator=torch.Generator().manual_seed(0)).view(4, -1).tolist()
    for starts, counts in (([0] * 4, lengths), (lengths, more), (longer, [1] * 4)):
        runs = [Run([0] * n, start, table, 118, 1) for start, n, table in zip(starts, counts, tables, strict=True)]
        batch = Batch(runs, block)
        projected = randn(sum(counts), (queries + 2 * shared) * size, seed=sum(counts)).bfloat16()
        angles = randn(sum(counts), 1, size // 4, seed=3)
        rotation = (angles.cos().bfloat16(), angles.sin().bfloat16())
        found = native(projected.clone(), rotation, stores[0], 1, batch)
        expected = plain(projected.clone(), rotation, stores[1], 1, batch)
        # Rotated to one bfloat16 or its neighbour, a number may be rounded to the next float8, 6% away.
        atol = 0.2 if kept == torch.float8_e4m3fn else 0.03
        torch.testing.assert_close(found, expected, rtol=0.05, atol=atol)
        for one, other in zip(
            stores[0].read(1, torch.arange(4 * blocks_each), torch.float32),
            stores[1].read(1, torch.arange(4 * blocks_each), torch.float32),
            strict=True,
        ):
            assert relative_error(one, other.double()) < 0.02
    # The same stored bits in float32: what is left is the kernel's own error.
    queries_alone = projected.view(4, -1, size)[:, :queries].float()
    again = native(projected.clone(), None, stores[0], 1, batch)
    exact = attend(queries_alone, _as_float32(stores[0]), 1, heads.scale, window, cap, batch)
    assert relative_error(again.view_as(exact), exact.double()) < 0.004


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_does_not_depend_on_how_a_prompt_is_cut(
    compiled: ModuleType, window: int | None, tiles: bool
) -> None:
    """As where its beginning is in the cache."""
    heads = Heads(4, 2, 64, 0.125, window, None)
    attention = NativeAttention(compiled, heads)
    attention.tiles = tiles
    projected = randn(150, 8 * 64).bfloat16()

    def found(cuts: list[int]) -> torch.Tensor:
        store = PagedKeysValues([2], 64, 10, 16, torch.bfloat16)
        pieces = []
        for start, stop in itertools.pairwise(cuts):
            batch = Batch([Run([0] * (stop - start), start, list(range(10)), 160, 1)], 16)
            pieces.append(attention(projected[start:stop].clone(), None, store, 0, batch))
        return torch.cat(pieces)

    whole = found([0, 150])
    for cuts in ([0, 17, 150], [0, 64, 70, 150], [0, 101, 148, 150]):
        assert torch.equal(found(cuts), whole)


def _as_float32(store: PagedKeysValues) -> PagedKeysValues:
    blocks = store.layer(1).keys.shape[0]
    keys, values = store.read(1, torch.arange(blocks), torch.float32)
    heads, positions, size = keys.shape
    wide = PagedKeysValues([heads] * 2, size, blocks, store.block_size, torch.float32)
    wide.write(1, torch.arange(positions), keys.transpose(0, 1), values.transpose(0, 1))
    return wide


def test_float8_is_torchs(compiled: ModuleType) -> None:
    """Every float8 number, what lies between two of them, and what is too small or large, kept and read back."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    between = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, between, torch.tensor([448.0, -448.0])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 63)).view(-1, 63)
    values = torch.cat([values, torch.full((len(values), 1), 448.0)], dim=1).bfloat16()  # so that every scale is one
    tokens = len(values)
    store = PagedKeysValues([1], 64, tokens, 1, torch.float8_e4m3fn)
    batch = Batch([Run([0] * tokens, 0, list(range(tokens)), tokens, 1)], 1)
    projected = torch.cat([values, values, values], dim=1)
    NativeOperators(compiled, exact=False).attention(Heads(1, 1, 64, 1.0, None, None))(projected, None, store, 0, batch)
    kept_keys, kept_values = store.read(0, torch.arange(tokens), torch.float32)
    expected = values.float().to(torch.float8_e4m3fn).float()
    assert torch.equal(kept_values[0], expected)
    assert torch.equal(kept_keys[0], expected)


@pytest.mark.parametrize("size", [5, 16, 4097])
def test_logit_statistics(compiled: ModuleType, size: int) -> None:
    """Tokens, logits and sums beside float64; of equals the first; what is not a number makes a row unsound."""
    logits = randn(6, size, seed=size)
    logits[1] = logits[1].round()  # many equals
    logits[2] = 500.0
    logits[3, size - 2] = float("nan")
    logits[4, 1] = float("inf")
    logits[5] = float("-inf")
    for found in (
        NativeOperators(compiled, exact=False).logit_statistics(logits),
        Operators(torch.float32).logit_statistics(logits),
    ):
        assert [found.is_sound(row) for row in range(6)] == [True, True, True, False, False, False]
        for row in range(3):
            assert found.best[row] == int((logits[row] == logits[row].max()).nonzero()[0])
            assert found.highest[row] == logits[row].max()
            assert found.total[row] == pytest.approx(logits[row].double().logsumexp(-1).item(), abs=1e-5, rel=1e-6)


def test_tied_embeddings_are_kept_once(compiled: ModuleType, tmp_path: Path) -> None:
    tiny = make_model("llama", torch.bfloat16, hidden_size=512, tie_word_embeddings=True)
    model = Model(Checkpoint(save_model(tiny, tmp_path)), NativeOperators(compiled, exact=False))
    assert model._embedding.nbytes > 2 << 20
    assert model._embedding.matrix.values.data_ptr() == cast(NativeDenseLinear, model.head.linear)._weight.data_ptr()


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("architecture", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
def test_models_are_as_near_to_float32_as_transformers_in_bfloat16(
    compiled: ModuleType, architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Every architecture in pieces, prompts beside single tokens: the median error may be a quarter above transformers', in a mixture half.

    There a rounding may send a token to another expert, in either.
    """
    path = save_model(make_model(architecture, torch.bfloat16, **changes), tmp_path)
    prompts = [
        torch.randint(4, 4096, (length,), generator=torch.Generator().manual_seed(1)).tolist() for length in (60, 31)
    ]
    config = {"config": config_for(path)} if "layer_sizes" in changes else {}
    wide, narrow = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager", **config)
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        exact = [wide(torch.tensor([prompt])).logits[0] for prompt in prompts]
        theirs = [narrow(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
    pieces = [[(0, 17)], [(1, 20), (0, 9)], [(0, 1), (1, 1)], [(1, 1), (0, 1)], [(0, 31), (1, 1)], [(1, 8), (0, 1)]]
    ours = logits_in_pieces(path, prompts, pieces, NativeOperators(compiled, exact=False))
    allowed = 1.5 if architecture in ("mixtral", "qwen3_moe") else 1.25
    for found, beside, reference in zip(ours, theirs, exact, strict=True):
        assert (found - reference).abs().median() <= allowed * (beside - reference).abs().median()


@pytest.mark.parametrize("size", [32, 80])
@pytest.mark.parametrize("name", ["fp8", "int8", "fp8 by head", "int4 by head", "fp8 by token", "int8 by token"])
def test_keys_and_values_are_rounded_as_the_checkpoint_says(compiled: ModuleType, name: str, size: int) -> None:
    """The same codes and scales as torch keeps, from equal bits: nothing is rotated here."""
    description, kept = SCHEMES[name]
    args = QuantizationArgs(**description | ({"group_size": size} if description["dynamic"] else {}))
    shape = (3, 1, 1) if args.strategy == "attn_head" else (1,)
    most = [torch.linspace(first, 5, 3)[: shape[0]].view(shape) for first in (2.0, 3.0)]
    pair = tuple(ActivationRounding.observed(args, -high, high, torch.bfloat16) for high in most)
    assert kept is not None
    rules = CacheScheme(args, [(pair[0], pair[1])], size).rules(torch.bfloat16, kept)
    stores = [PagedKeysValues([3], size, 3, 7, kept, rules=rules) for _ in range(2)]
    projected = (2 * randn(20, 9 * size)).bfloat16()
    projected[4] = 0
    heads = Heads(3, 3, size, 1.0, None, None)
    batch = Batch([Run([0] * 20, 0, [2, 0, 1], 20, 1)], 7)
    for operators, store in zip(
        (NativeOperators(compiled, exact=False), Operators(torch.bfloat16)), stores, strict=True
    ):
        operators.attention(heads)(projected.clone(), None, store, 0, batch)
    for one, other in zip(*(vars(store.layer(0)).values() for store in stores), strict=True):
        assert one is not None
        assert torch.equal(one.float(), other.float())
