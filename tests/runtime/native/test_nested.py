"""8-bit codes in two planes: the same numbers, and the upper plane alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.native.library import kernels
from smelt.runtime.native.linears import CodesLinear
from smelt.runtime.weights.matrix import Matrix
from smelt.system.errors import RuntimeProblem

PROMPTS = [[1, 5, 9, 5, 9], [3, 4, 3, 4, 7], [11, 12], list(range(60, 5, -1))]


@pytest.fixture(scope="module")
def native() -> ModuleType:
    found = kernels(print)
    if found is None:
        pytest.skip("Smelt's compiled kernels cannot be used here")
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns", "group"), [(100, 256, 128), (64, 128, 32), (40, 64, 64), (33, 96, 96)])
@pytest.mark.parametrize("exact", [False, True])
def test_planes_give_what_whole_codes_give(
    native: ModuleType, rows: int, columns: int, group: int, dtype: torch.dtype, exact: bool
) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scale = (torch.rand(rows, columns // group) * 0.01 + 0.001).to(dtype)
    matrix, bias = Matrix(codes, "int8", 8, scale), torch.randn(rows).bfloat16()
    whole = CodesLinear(native, matrix, bias, exact)
    planes = CodesLinear(native, matrix, bias, exact, planes=True)
    upper = planes.upper()
    assert upper is not None
    assert upper.nbytes + codes.numel() // 2 <= planes.nbytes == whole.nbytes
    middles = ((codes >> 4).double() + 0.5).unflatten(1, (-1, group)) * 16 * scale.double().unsqueeze(-1)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 40):
        x = torch.randn(count, columns).bfloat16()
        assert torch.equal(planes(x), whole(x))
        expected = x.double() @ middles.flatten(1).T + bias.double()
        assert (upper(x).double() - expected).norm() < 0.015 * expected.norm()  # int8 inputs, bfloat16 outputs


def test_what_has_no_planes(native: ModuleType) -> None:
    codes, scale = torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 1).bfloat16()
    assert CodesLinear.nests(Matrix(codes, "int8", 8, scale))
    assert not CodesLinear.nests(Matrix(codes, "int4", 4, scale))
    assert not CodesLinear.nests(Matrix(codes, "int8", 8, scale, zero=torch.ones(32, 1, dtype=torch.int8)))
    assert not CodesLinear.nests(Matrix.plain(scale))
    assert CodesLinear(native, Matrix(codes, "int8", 8, scale), None, False).upper() is None


@pytest.fixture(params=["llama", "gemma2", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """Quantized, also with a tied lm_head and with experts."""
    recipe = {
        "model": str(tiny(request.param, torch.bfloat16)),
        "output": str(tmp_path / "run"),
        "evaluate": False,
        "calibrate": {"samples": 8, "length": 64},
        "steps": [{"quantize": {"scheme": "W4in8", "group_size": 32}}],
    }
    return run(Recipe.model_validate(recipe), progress=False).checkpoint


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_a_model_drafts_for_itself(native: ModuleType, checkpoint: Path, params: dict[str, Any]) -> None:
    """Its tokens are those without drafts, and no memory is taken besides."""
    engine = Engine(checkpoint, drafter="nested", draft_tokens=3, quiet=True, max_model_len=128)
    sampling = SamplingParams(max_tokens=32, ignore_eos=True, **params)
    drafted = engine.generate(PROMPTS, sampling)
    assert engine.drafting is not None
    assert (engine.drafting.total.acceptance or 0) > 0.1  # of random weights; another model's would be one of thousands
    plain = Engine(checkpoint, quiet=True, max_model_len=128)
    assert engine.reservation.weights == plain.reservation.weights
    engine.scheduler.drafting = None
    alone = engine.generate(PROMPTS, sampling)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in alone]
    assert sum(output.draft_tokens for output in alone) == 0


def test_others_are_refused(native: ModuleType, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", torch.bfloat16)
    with pytest.raises(RuntimeProblem, match="no weights of 8 bits"):
        Engine(path, drafter="nested", quiet=True)
    with pytest.raises(RuntimeProblem, match="compiled CPU kernels"):
        Engine(path, drafter="nested", dtype="float32", quiet=True)
    with pytest.raises(RuntimeProblem, match="without reproducible"):
        Engine(path, drafter="nested", reproducible=True, quiet=True)
