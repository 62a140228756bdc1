"""Every kernel and every option in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from smelt.runtime.kernels.base.kernel import Case, PreparedCase, problem
from smelt.runtime.kernels.linear.linear_bytes import BytesCase, linear_bytes
from smelt.runtime.kernels.tiles.tile import Tile
from smelt.runtime.kernels.tools.registry import KERNELS

from .interpreter import interpreted

CPU = torch.device("cpu")
# The interpreter does not know AMD's own 8-bit float.
CASES = [
    pytest.param(kernel.name, case, id=f"{kernel.name}: {case.name}")
    for kernel in KERNELS
    for case in kernel.cases
    if not case.large and (not case.targets or "sm_90" in case.targets)
]


@pytest.mark.few(5)
@interpreted
@pytest.mark.parametrize(("kernel", "case"), CASES)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_case_agrees_with_float64_on_fresh_inputs(kernel: str, case: Case) -> None:
    seed = int(torch.randint(1 << 30, ()).item())
    assert problem(case, CPU, seed) is None, f"seed {seed}"


@interpreted
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_inputs_that_are_no_numbers_give_none(code: torch.dtype, blocks: bool, broken: float) -> None:
    """Rounding must not make numbers of them: the engine ends such a request instead of going on."""
    case = BytesCase(code, 3, 64, 256, blocks)
    weight, x = case.packed(CPU), torch.randn(3, 256).half()
    x[1, 200] = broken
    found = linear_bytes(x, weight, Tile(64, 16, 128, 2, 4, 3, False))
    assert found.isfinite().all(1).tolist() == [True, False, True]


def _trial(compute: list[torch.Tensor], expected: torch.Tensor) -> Case:
    runs = iter(compute)
    return Case("made up", lambda device, draw: PreparedCase(lambda: next(runs), expected, 0), 2e-3)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        (
            "not written",
            lambda out: out.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(float("nan")).half()),
        ),
        ("one output", lambda out: out.index_put((torch.tensor(3), torch.tensor(2)), out[3, 2] + 0.1)),
        ("outputs are", lambda out: out * 1.01),
    ],
)
def test_wrong_outputs_are_found(what: str, change: object) -> None:
    right = torch.randn(100, 100)
    out = right.half()
    assert callable(change)
    assert problem(_trial([out, out], right.double()), CPU, 0) is None
    found = problem(_trial([change(out), change(out)], right.double()), CPU, 0)
    assert found is not None
    assert what in found


def test_a_race_is_found() -> None:
    right = torch.randn(100, 100)
    out = right.half()
    other = out.clone()
    other[0, 0] = torch.nextafter(out[0, 0], torch.tensor(9.0).half())
    assert "run 2 differs bitwise" in str(problem(_trial([out, other], right.double()), CPU, 0))
    fifty = [*[out] * 36, other, *[out] * 13]
    assert "run 37 differs bitwise" in str(problem(_trial(fifty, right.double()), CPU, 0, runs=50))
    assert problem(_trial([out] * 50, right.double()), CPU, 0, runs=50) is None
