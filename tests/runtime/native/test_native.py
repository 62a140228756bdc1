"""The compiled kernels against float64, where this machine can compile and run them."""

from __future__ import annotations

import shutil
import signal
import subprocess
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
from smelt.runtime.native import library
from smelt.runtime.native.linears import CodesLinear, NativeDenseLinear
from smelt.runtime.native.operators import NativeOperators
from smelt.runtime.native.try_tiles import tried
from smelt.runtime.weights.cache_scheme import CacheScheme
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.runtime.weights.matrix import Matrix
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...tiny import make_model, save_model
from ..decoder.test_architectures import VARIANTS
from ..drive import logits_in_pieces
from ..weights.test_cache_scheme import SCHEMES

BY_TOKEN = ActivationRounding(QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True))


@pytest.fixture(scope="module")
def compiled() -> ModuleType:
    notices: list[str] = []
    found = library.kernels(notices.append)
    if found is None:
        pytest.skip(notices[-1])
    return found


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _matrix(bits: int, outputs: int, columns: int, group: int, *, asymmetric: bool, dtype: torch.dtype) -> Matrix:
    generator = torch.Generator().manual_seed(outputs + columns)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (outputs, columns), generator=generator, dtype=torch.int8)
    scale = (torch.rand(outputs, columns // group, generator=generator) * 0.01 + 0.001).to(dtype)
    zero = torch.randint(-half, half, scale.shape, generator=generator, dtype=torch.int8) if asymmetric else None
    return Matrix(codes, f"int{bits} g{group}", bits, scale, zero)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "group"), [(256, 32), (384, 128), (200, 8), (200, 200)])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_codes(compiled: ModuleType, bits: int, columns: int, group: int, asymmetric: bool, dtype: torch.dtype) -> None:
    matrix = _matrix(bits, 75, columns, group, asymmetric=asymmetric, dtype=dtype)
    bias = _random(75, seed=1)
    weight = matrix_in_float64(matrix)
    assert CodesLinear.takes(matrix)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 21):
        x = _random(rows, columns, seed=rows).bfloat16()
        expected = x.double() @ weight.T + bias.bfloat16().double()
        # Rounding the result alone costs up to 2^-9. Int8 inputs are off by up to a 255th of their group's largest.
        assert _error(CodesLinear(compiled, matrix, bias, exact=True)(x), expected) < 0.003
        assert _error(CodesLinear(compiled, matrix, bias, exact=False)(x), expected) < 0.015


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, 32, 128])
def test_sums_of_the_largest_codes_and_inputs(compiled: ModuleType, bits: int, group: int) -> None:
    """Products may be added up in 16 bits as long as they fit."""
    half = 1 << (bits - 1)
    codes = torch.tensor([half - 1, -half], dtype=torch.int8)[:, None].expand(2, 256).repeat(20, 1)
    matrix = Matrix(codes, f"int{bits} g{group}", bits, torch.ones(40, 256 // group))
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand(4, 256).bfloat16()
    expected = x.double() @ codes.double().T
    linears = [CodesLinear(compiled, matrix, None, exact=exact, few_exact=exact) for exact in (False, True)]
    if bits == 8:
        linears.append(CodesLinear(compiled, matrix, None, exact=False, few_exact=False, planes=True))
    for linear in linears:
        for rows in range(1, 5):
            assert _error(linear(x[:rows]), expected[:rows]) < 0.01


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("outputs", [128, 75, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_codes_do_not_depend_on_each_other(
    compiled: ModuleType, bits: int, asymmetric: bool, outputs: int, dtype: torch.dtype
) -> None:
    """Few are multiplied by two tiles of outputs at a time, which are not always there."""
    matrix = _matrix(bits, outputs, 256, 64, asymmetric=asymmetric, dtype=dtype)
    bias, x = _random(outputs, seed=1), _random(21, 256, seed=2).bfloat16()
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
@pytest.mark.parametrize("asymmetric", [False, True])
def test_inputs_of_few_rows_are_exact_down_to_a_64th_of_the_largest(
    compiled: ModuleType, bits: int, asymmetric: bool
) -> None:
    matrix = _matrix(bits, 75, 128, 128, asymmetric=asymmetric, dtype=torch.bfloat16)
    matrix = replace(matrix, scale=torch.full((75, 1), 0.25).bfloat16())
    weight = matrix_in_float64(matrix)
    linear, all_rows = CodesLinear(compiled, matrix, None, exact=False), CodesLinear(compiled, matrix, None, exact=True)
    magnitudes = torch.rand(40, 128, generator=torch.Generator().manual_seed(1)) * 63 + 1
    factors = torch.logspace(-30, 30, 40)
    factors[20] = 1
    x = (magnitudes * _random(40, 128, seed=2).sign() * factors.unsqueeze(1)).bfloat16()
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
    matrix = _matrix(bits, 270, 4096, 128, asymmetric=asymmetric, dtype=torch.bfloat16)
    bias, weight = _random(270, seed=1), matrix_in_float64(matrix)
    linear, rounded = (CodesLinear(compiled, matrix, bias, exact=False, few_exact=few) for few in (True, False))
    x = _random(4, 4096, seed=2).bfloat16()
    expected = x.double() @ weight.T + bias.bfloat16().double()
    alone = CodesLinear(compiled, matrix, bias, exact=True)(x)
    all_rows = rounded(x)
    assert _error(alone, expected) < 0.003
    assert _error(all_rows, expected) < 0.015
    for threads in (1, 2, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows in (1, 2):
            assert torch.equal(linear(x[:rows]), alone[:rows])
        for rows in (1, 2, 3, 4):
            assert torch.equal(rounded(x[:rows]), all_rows[:rows])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_columns_in_activation_order(compiled: ModuleType, rows: int) -> None:
    matrix = _matrix(4, 75, 256, 32, asymmetric=True, dtype=torch.bfloat16)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    linear = CodesLinear(compiled, replace(matrix, order=order), None, exact=False)
    x = _random(rows, 256, seed=rows).bfloat16()
    weight = torch.empty(75, 256, dtype=torch.float64)
    weight[:, order] = matrix_in_float64(matrix)
    assert _error(linear(x), x.double() @ weight.T) < 0.015


def matrix_in_float64(matrix: Matrix) -> Tensor:
    assert matrix.scale is not None
    groups = matrix.scale.shape[1]
    codes = matrix.values.double().unflatten(1, (groups, -1))
    if matrix.zero is not None:
        codes = codes - matrix.zero.double().unsqueeze(-1)
    return (codes * matrix.scale.double().unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_int8_by_token_is_the_rounded_product(compiled: ModuleType, rows: int) -> None:
    codes = torch.randint(-128, 128, (96, 1024), generator=torch.Generator().manual_seed(rows), dtype=torch.int8)
    matrix = Matrix(codes, "int8", 8, torch.full((96, 1), 0.01), None, BY_TOKEN)
    x = (_random(rows, 1024) * _random(rows, 1, seed=2)).bfloat16()
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
    matrix = replace(_matrix(bits, 75, columns, group, asymmetric=False, dtype=torch.bfloat16), inputs=fixed)
    linear = CodesLinear(compiled, matrix, None, exact=False)
    assert "inputs rounded to int8 with a fixed scale" in linear.explain()
    unit = Matrix(torch.eye(columns, dtype=torch.int8), "int8", 8, torch.ones(columns, 1), None, fixed)
    for rows in (1, 3, 21):
        x = (2 * _random(rows, columns, seed=rows)).bfloat16()
        x[0, :2] = torch.tensor([float("inf"), -float("inf")])
        assert torch.equal(CodesLinear(compiled, unit, None, exact=False)(x), fixed(x))
        assert fixed.scale is not None
        whole = (fixed(x).double() / fixed.scale.double()).round() * fixed.scale.double()
        assert _error(linear(x), whole @ matrix_in_float64(matrix).T) < 0.003
        tiled = torch.empty(rows, 75, dtype=torch.bfloat16)
        if compiled.linear_tiles(linear.handle, x.data_ptr(), rows, tiled.data_ptr(), 2):
            assert torch.equal(tiled, linear(x))
        x[0, 5] = float("nan")
        assert linear(x)[0].isnan().all()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("columns", "group"), [(256, 32), (384, 128), (192, 96), (256, 256)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_matrix_tiles_give_the_same_bits(
    compiled: ModuleType, bits: int, columns: int, group: int, asymmetric: bool
) -> None:
    """What is computed on matrix tiles, emulated where the processor has none, beside vector instructions."""
    for dtype in (torch.bfloat16, torch.float32):
        matrix = _matrix(bits, 75, columns, group, asymmetric=asymmetric, dtype=dtype)
        linear = CodesLinear(compiled, matrix, _random(75, seed=1), exact=False)
        for rows in (3, 16, 17, 32, 70):
            x = _random(rows, columns, seed=rows).bfloat16()
            found = torch.empty(rows, 75, dtype=torch.bfloat16)
            assert compiled.linear_tiles(linear.handle, x.data_ptr(), rows, found.data_ptr(), 2)
            assert torch.equal(found, linear(x))


@pytest.mark.parametrize(("columns", "group"), [(256, 32), (384, 128), (256, 256)])
def test_matrix_tiles_read_planes(compiled: ModuleType, columns: int, group: int) -> None:
    """Both of them as one weight, and the upper one alone."""
    for dtype in (torch.bfloat16, torch.float32):
        matrix = _matrix(8, 75, columns, group, asymmetric=False, dtype=dtype)
        planes = CodesLinear(compiled, matrix, _random(75, seed=1), exact=False, planes=True)
        upper = planes.upper()
        assert upper is not None
        for linear in (planes, upper):
            for rows in (3, 17, 70):
                x = _random(rows, columns, seed=rows).bfloat16()
                found = torch.empty(rows, 75, dtype=torch.bfloat16)
                assert compiled.linear_tiles(linear.handle, x.data_ptr(), rows, found.data_ptr(), 2)
                assert torch.equal(found, linear(x))


def test_matrix_tiles_by_token(compiled: ModuleType) -> None:
    codes = torch.randint(-128, 128, (96, 1024), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    linear = CodesLinear(
        compiled, Matrix(codes, "int8", 8, torch.full((96, 1), 0.01), None, BY_TOKEN), None, exact=False
    )
    x = _random(40, 1024).bfloat16()
    found = torch.empty(40, 96, dtype=torch.bfloat16)
    assert compiled.linear_tiles(linear.handle, x.data_ptr(), 40, found.data_ptr(), 2)
    assert torch.equal(found, linear(x))


def test_groups_that_matrix_tiles_do_not_take(compiled: ModuleType) -> None:
    linear = CodesLinear(compiled, _matrix(4, 40, 200, 8, asymmetric=False, dtype=torch.bfloat16), None, exact=False)
    x, found = _random(20, 200).bfloat16(), torch.empty(20, 40, dtype=torch.bfloat16)
    assert not compiled.linear_tiles(linear.handle, x.data_ptr(), 20, found.data_ptr(), 2)


@pytest.mark.parametrize(
    ("code", "right", "kept", "said"),
    [
        (library.Verdict.RIGHT, True, "right", None),
        (library.Verdict.WRONG, False, "wrong", "give wrong results"),
        (-signal.SIGILL, False, "wrong", "give wrong results"),
        (library.Verdict.REFUSED, False, None, "the operating system does not allow them"),
        (1, False, None, "exit status 1"),
        (-signal.SIGKILL, False, None, "exit status -9"),
    ],
)
def test_what_a_trial_of_matrix_tiles_ends_with(
    code: int, right: bool, kept: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A verdict is kept and not asked for again; a trial that broke is none."""
    runs: list[Any] = []

    def run(*arguments: Any, **_: Any) -> Any:
        runs.append(arguments)
        return subprocess.CompletedProcess(arguments, code)

    monkeypatch.setattr(library.subprocess, "run", run)
    for _ in range(2):
        messages: list[str] = []
        assert library._tiles_are_right(tmp_path / "library.so", messages.append) == right
        assert (said is None and not messages) or (said is not None and said in messages[0])
    assert len(runs) == (1 if kept else 2)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([kept] if kept else [])


@pytest.mark.slow
def test_a_trial_of_matrix_tiles_runs(compiled: ModuleType) -> None:
    """The process itself, on whatever this processor is."""
    assert compiled.__file__ is not None
    expected = "right" if "amx_int8" in library.processor_features() else "the operating system does not allow them"
    assert library._tiles_tried(Path(compiled.__file__)) == expected


@pytest.mark.parametrize("wrong_rows", [0, 33])
def test_trying_matrix_tiles_finds_what_is_wrong(compiled: ModuleType, wrong_rows: int) -> None:
    class Tiled:
        """The kernels as they would be with matrix tiles, of which some are broken."""

        used = False

        def __getattr__(self, name: str) -> Any:
            return getattr(compiled, name)

        def use_tiles(self) -> bool:
            self.used = True
            return True

        def linear(self, handle: Any, x: int, rows: int, out: int, threads: int) -> None:
            if not (self.used and rows == wrong_rows):
                compiled.linear(handle, x, rows, out, threads)

    assert tried(cast(ModuleType, Tiled())) == (library.Verdict.WRONG if wrong_rows else library.Verdict.RIGHT)


def test_extreme_inputs(compiled: ModuleType) -> None:
    matrix = _matrix(4, 40, 256, 128, asymmetric=False, dtype=torch.bfloat16)
    module = CodesLinear(compiled, matrix, None, exact=False)
    x = _random(6, 256).bfloat16()
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    x[3] = 0
    x[4] *= 1e30
    for rows in (x, x[1:2], x[1:3]):
        assert (~module(rows).isfinite()).any(-1).tolist() == (~rows.isfinite()).any(-1).tolist()
    assert not module(x)[3].any()
    assert _error(module(x)[4:5], x[4:5].double() @ matrix_in_float64(matrix).T) < 0.01


@pytest.mark.parametrize(("outputs", "columns"), [(101, 72), (64, 256), (3, 8), (130, 2049), (20, 8200)])
def test_dense(compiled: ModuleType, outputs: int, columns: int) -> None:
    weight, bias = _random(outputs, columns).bfloat16(), _random(outputs, seed=1).bfloat16()
    for rows in (0, 1, 2, 3, 5, 8, 31, 33):
        x = _random(rows, columns, seed=2).bfloat16()
        found = NativeDenseLinear(compiled, weight, bias, "")(x)
        expected = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize(("outputs", "columns"), [(7, 31), (13, 2048), (50, 4133), (1023, 2081), (13, 16455)])
def test_dense_rows_do_not_depend_on_each_other(compiled: ModuleType, outputs: int, columns: int) -> None:
    weight, bias = _random(outputs, columns).bfloat16(), _random(outputs, seed=1).bfloat16()
    linear = NativeDenseLinear(compiled, weight, bias, "", any_rows=True)
    x = _random(300, columns, seed=2).bfloat16()
    found = linear(x)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-5)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 127, 128, 129, 131):
        assert torch.equal(linear(x[:rows]), found[:rows])
        assert torch.equal(linear(x[-rows:]), found[-rows:])


@pytest.mark.parametrize("count", [1, 17, 5000, 70_001])
def test_sums_and_float32_are_torchs(compiled: ModuleType, count: int) -> None:
    operators = NativeOperators(compiled, exact=False)
    a, b = _random(count).bfloat16(), _random(count, seed=1).bfloat16()
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
    weight, x = _random(size).bfloat16().float(), (3 * _random(5, size, seed=1)).bfloat16()
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert _error(operators.rms_norm(weight, 1e-5, rounds_first)(x), wide * weight.double()) < 0.004
    torch.testing.assert_close(
        operators.rms_norm(weight, 1e-5, rounds_first)(x), plain.rms_norm(weight, 1e-5, rounds_first)(x)
    )
    both = (8 * _random(5, 2 * size, seed=2)).bfloat16()
    first, second = both.double().chunk(2, -1)
    for name, activate in (
        ("silu", torch.nn.functional.silu),
        ("gelu_pytorch_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        assert _error(operators.gate(name)(both), activate(first) * second) < 0.004


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("queries", "shared", "size", "window", "cap", "block"),
    [(4, 4, 8, None, None, 16), (8, 2, 64, None, None, 16), (7, 1, 128, 20, None, 5), (6, 2, 80, 3, 30.0, 32)],
)
def test_attention(
    compiled: ModuleType,
    kept: torch.dtype,
    queries: int,
    shared: int,
    size: int,
    window: int | None,
    cap: float | None,
    block: int,
) -> None:
    """Prompts of several lengths, then some more tokens, then one each: kernels beside torch, on the same stored bits."""
    heads = Heads(queries, shared, size, size**-0.5, window, cap)
    lengths, more, blocks_each = [1, 13, 40, 100], [3, 1, 9, 17], -(-118 // block)
    longer = [a + b for a, b in zip(lengths, more, strict=True)]
    stores = [PagedKeysValues([shared] * 2, size, 4 * blocks_each, block, kept) for _ in range(2)]
    native, plain = NativeOperators(compiled, exact=False).attention(heads), Operators(torch.bfloat16).attention(heads)
    # Blocks lie scattered, as in a cache that has been used.
    tables = torch.randperm(4 * blocks_each, generator=torch.Generator().manual_seed(0)).view(4, -1).tolist()
    for starts, counts in (([0] * 4, lengths), (lengths, more), (longer, [1] * 4)):
        runs = [Run([0] * n, start, table, 118, 1) for start, n, table in zip(starts, counts, tables, strict=True)]
        batch = Batch(runs, block)
        projected = _random(sum(counts), (queries + 2 * shared) * size, seed=sum(counts)).bfloat16()
        angles = _random(sum(counts), 1, size // 4, seed=3)
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
            assert _error(one, other.double()) < 0.02
    # The same stored bits in float32: what is left is the kernel's own error.
    queries_alone = projected.view(4, -1, size)[:, :queries].float()
    again = native(projected.clone(), None, stores[0], 1, batch)
    exact = attend(queries_alone, _as_float32(stores[0]), 1, heads.scale, window, cap, batch)
    assert _error(again.view_as(exact), exact.double()) < 0.004


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
    logits = _random(6, size, seed=size)
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


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    said: list[str] = []
    monkeypatch.setattr(library, "_found", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library, "processor_features", lambda: frozenset(library._NEEDED))
    assert library.kernels(said.append) is None
    assert "cannot be compiled" in said[-1]
    assert "torch's operators" in said[-1]
    assert "a C++ compiler is needed" in said[-1]


def test_what_else_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that finds no headers, as on Debian without python3-dev."""
    real = shutil.which("c++")
    if real is None:
        pytest.skip("no compiler here")
    compiler = tmp_path / "c++"
    missing = "echo 'a.cpp:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) {missing};; *) exec {real} "$@";; esac\n')
    compiler.chmod(0o755)
    said: list[str] = []
    monkeypatch.setattr(library, "_found", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "processor_features", lambda: frozenset(library._NEEDED))
    assert library.kernels(said.append) is None
    assert "Python's headers (python3-dev)" in said[-1]


def test_without_the_instructions_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(library, "processor_features", lambda: frozenset({"avx512f"}))
    assert library.kernels(said.append) is None
    assert "has no avx2, bmi2, f16c, fma:" in said[0]


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
    projected = (2 * _random(20, 9 * size)).bfloat16()
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
