"""AMX tiles, or their emulation, beside the vector kernels."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from smelt.runtime.native import library
from smelt.runtime.native.linears import CodesLinear, NativeDenseLinear
from smelt.runtime.native.try_tiles import tried
from smelt.runtime.weights.matrix import Matrix

from .random_matrix import BY_TOKEN, coded_matrix, randn


def by_vectors(linear: CodesLinear, x: torch.Tensor) -> torch.Tensor:
    """The same, of so few rows at a time that no tiles compute them."""
    return torch.cat([linear(few) for few in x.split(8)])


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("columns", "group"), [(256, 32), (384, 128), (192, 96), (256, 256), (1536, 768)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_matrix_tiles_give_the_same_bits(
    compiled: ModuleType, bits: int, columns: int, group: int, asymmetric: bool
) -> None:
    """What is computed on matrix tiles, emulated where the processor has none, beside vector instructions."""
    for dtype in (torch.bfloat16, torch.float32):
        matrix = coded_matrix(bits, 75, columns, group, asymmetric=asymmetric, dtype=dtype)
        linear = CodesLinear(compiled, matrix, randn(75, seed=1), exact=False, few_exact=False)
        for rows in (3, 16, 17, 32, 33, 64, 70):
            x = randn(rows, columns, seed=rows).bfloat16()
            found = torch.empty(rows, 75, dtype=torch.bfloat16)
            assert compiled.linear_tiles(linear.handle, x.data_ptr(), rows, found.data_ptr(), 2)
            assert torch.equal(found, by_vectors(linear, x))


@pytest.mark.parametrize(("columns", "group"), [(256, 32), (384, 128), (256, 256), (1536, 768)])
def test_matrix_tiles_read_planes(compiled: ModuleType, columns: int, group: int) -> None:
    """Both of them as one weight, and the upper one alone."""
    for dtype in (torch.bfloat16, torch.float32):
        matrix = coded_matrix(8, 75, columns, group, asymmetric=False, dtype=dtype)
        planes = CodesLinear(compiled, matrix, randn(75, seed=1), exact=False, few_exact=False, planes=True)
        upper = planes.upper()
        assert upper is not None
        for linear in (planes, upper):
            for rows in (3, 17, 40, 64, 70):
                x = randn(rows, columns, seed=rows).bfloat16()
                found = torch.empty(rows, 75, dtype=torch.bfloat16)
                assert compiled.linear_tiles(linear.handle, x.data_ptr(), rows, found.data_ptr(), 2)
                assert torch.equal(found, by_vectors(linear, x))


def test_matrix_tiles_by_token(compiled: ModuleType) -> None:
    codes = torch.randint(-128, 128, (96, 1024), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    linear = CodesLinear(
        compiled, Matrix(codes, "int8", 8, torch.full((96, 1), 0.01), None, BY_TOKEN), None, exact=False
    )
    for rows in (20, 40, 64, 100):
        x = randn(rows, 1024).bfloat16()
        found = torch.empty(rows, 96, dtype=torch.bfloat16)
        assert compiled.linear_tiles(linear.handle, x.data_ptr(), rows, found.data_ptr(), 2)
        assert torch.equal(found, by_vectors(linear, x))


@pytest.mark.parametrize(("outputs", "columns"), [(7, 31), (64, 256), (3, 8), (50, 4133), (75, 2080)])
def test_bfloat16_on_matrix_tiles(compiled: ModuleType, outputs: int, columns: int) -> None:
    """Beside float64; a row's numbers do not depend on the other rows, nor on how many tiles these fill."""
    weight, bias = randn(outputs, columns).bfloat16(), randn(outputs, seed=1).bfloat16()
    linear = NativeDenseLinear(compiled, weight, bias, "", any_rows=True)
    x = randn(80, columns, seed=2).bfloat16()
    found = linear.on_tiles(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias.double(), rtol=2**-7, atol=2**-5)
    for rows in (1, 3, 16, 17, 32, 33, 49, 64):
        assert torch.equal(linear.on_tiles(x[:rows]), found[:rows])
        assert torch.equal(linear.on_tiles(x[-rows:]), found[-rows:])


def test_more_rows_than_stay_together_on_matrix_tiles(compiled: ModuleType) -> None:
    weight = randn(40, 96).bfloat16()
    linear = NativeDenseLinear(compiled, weight, None, "", any_rows=True)
    x = randn(530, 96, seed=2).bfloat16()
    found = linear.on_tiles(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2**-7, atol=2**-5)
    assert torch.equal(linear.on_tiles(x[500:510]), found[500:510])


def test_several_blocks_and_pieces_on_matrix_tiles(compiled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """More outputs than are multiplied together, and more columns."""
    weight, x = randn(300, 2088).bfloat16(), randn(49, 2088, seed=2).bfloat16()
    linear = NativeDenseLinear(compiled, weight, None, "", any_rows=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = linear.on_tiles(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2**-7, atol=2**-5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(linear.on_tiles(x), found)
    assert torch.equal(linear.on_tiles(x[40:41]), found[40:41])


def test_bfloat16_that_is_not_finite_on_matrix_tiles(compiled: ModuleType) -> None:
    """It stays in its row, and zeros that fill up tiles do not meet the weights of others."""
    weight = randn(20, 40).bfloat16()
    weight[3, 39] = float("inf")
    x = randn(20, 40, seed=1).bfloat16()
    x[1, 7] = float("nan")
    found = NativeDenseLinear(compiled, weight, None, "", any_rows=True).on_tiles(x)
    assert found.isfinite().equal((x.double() @ weight.double().T).isfinite())


def test_groups_that_matrix_tiles_do_not_take(compiled: ModuleType) -> None:
    linear = CodesLinear(
        compiled, coded_matrix(4, 40, 200, 8, asymmetric=False, dtype=torch.bfloat16), None, exact=False
    )
    x, found = randn(20, 200).bfloat16(), torch.empty(20, 40, dtype=torch.bfloat16)
    assert not compiled.linear_tiles(linear.handle, x.data_ptr(), 20, found.data_ptr(), 2)


@pytest.mark.parametrize(
    ("code", "right", "kept", "said"),
    [
        (library.Verdict.RIGHT, "all", "right", None),
        (library.Verdict.ONLY_CODES, "codes", "codes", "for quantized weights only"),
        (library.Verdict.WRONG, "none", "wrong", "give wrong results"),
        (-signal.SIGILL, "none", "wrong", "give wrong results"),
        (library.Verdict.REFUSED, "none", None, "the operating system does not allow them"),
        (1, "none", None, "exit status 1"),
        (-signal.SIGKILL, "none", None, "exit status -9"),
    ],
)
def test_what_a_trial_of_matrix_tiles_ends_with(
    code: int, right: str, kept: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A verdict is kept and not asked for again; a trial that broke is none."""
    runs: list[Any] = []

    def run(*arguments: Any, **_: Any) -> Any:
        runs.append(arguments)
        return subprocess.CompletedProcess(arguments, code)

    monkeypatch.setattr(library.subprocess, "run", run)
    for _ in range(2):
        messages: list[str] = []
        assert library._right_tiles(tmp_path / "library.so", messages.append) == right
        assert (said is None and not messages) or (said is not None and said in messages[0])
    assert len(runs) == (1 if kept else 2)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([kept] if kept else [])


@pytest.mark.slow
def test_a_trial_of_matrix_tiles_runs(compiled: ModuleType) -> None:
    """The process itself, on whatever this processor is."""
    assert compiled.__file__ is not None
    expected = "right" if "amx_int8" in library.processor_features() else "the operating system does not allow them"
    assert library._tiles_tried(Path(compiled.__file__)) == expected


@pytest.mark.parametrize(
    ("broken", "verdict"),
    [
        (None, library.Verdict.RIGHT),
        ("linear", library.Verdict.WRONG),
        ("dense_tiles", library.Verdict.ONLY_CODES),
    ],
)
def test_trying_matrix_tiles_finds_what_is_wrong(
    compiled: ModuleType, broken: str | None, verdict: library.Verdict
) -> None:
    class Tiled:
        """The kernels as they would be with matrix tiles, of which some are broken."""

        used = False

        def __getattr__(self, name: str) -> Any:
            return getattr(compiled, name)

        def use_tiles(self, dense: bool) -> bool:
            self.used = dense
            return True

        def linear(self, *arguments: Any) -> None:
            self._compute("linear", *arguments)

        def dense_tiles(self, *arguments: Any) -> None:
            self._compute("dense_tiles", *arguments)

        def _compute(self, name: str, handle: Any, x: int, rows: int, out: int, threads: int) -> None:
            if not (self.used and name == broken and rows == 33):
                getattr(compiled, name)(handle, x, rows, out, threads)

    assert tried(cast(ModuleType, Tiled())) == verdict
