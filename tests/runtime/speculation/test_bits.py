"""Where kernels compute a row alike in any company, drafts change no bit of the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.native.library import kernels

from .pretend import pretend

PROMPTS = [[1, 5, 9, 5, 9, 5, 9], [3, 4, 3, 4, 7, 3, 4]]


@pytest.fixture(autouse=True)
def _native() -> None:
    if kernels(print) is None:
        pytest.skip("Smelt's compiled kernels cannot be used here")


def quantized(model: Path, output: Path) -> Path:
    steps = [{"quantize": {"scheme": "W4A16", "group_size": 32}}]
    recipe = {"model": str(model), "output": str(output), "evaluate": False, "steps": steps}
    return run(Recipe.model_validate(recipe), progress=False).checkpoint


@pytest.mark.few(3)
@pytest.mark.parametrize("drafter", ["lookup", "w4"])
@pytest.mark.parametrize("verifier", ["bfloat16", "w4 reproducible"])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 3}], ids=str)
@pytest.mark.parametrize("branches", [0, 3])
def test_log_probabilities_have_the_same_bits(
    drafter: str, verifier: str, params: dict[str, Any], branches: int, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny("llama", torch.bfloat16)
    w4 = quantized(model, tmp_path / "w4")
    path, options = (model, {}) if verifier == "bfloat16" else (w4, {"reproducible": True})
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3, **params)
    drafts = {"drafter": str(w4) if drafter == "w4" else drafter, "draft_tokens": 3, "draft_branches": branches}
    engine = Engine(path, quiet=True, max_model_len=64, **drafts, **options)
    alone = Engine(path, quiet=True, max_model_len=64, **options)
    for drafted, expected in zip(engine.generate(PROMPTS, sampling), alone.generate(PROMPTS, sampling), strict=True):
        assert drafted.outputs == expected.outputs
    assert engine.drafting is not None
    if drafter == "w4":
        assert engine.drafting.total.verified > 0


@pytest.mark.parametrize("branches", [0, 2])
def test_drafts_make_no_step_so_long_that_torch_computes_it(branches: int, tiny: Callable[..., Path]) -> None:
    """Torch's product of many rows has other bits than the kernel for few."""
    model = tiny("llama", torch.bfloat16)
    prompts = [[1 + i, 5, 9, 5, 9, 5, 9] for i in range(7)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=3)
    wanted = Engine(model, quiet=True, max_model_len=64).generate(prompts, params)
    engine = Engine(
        model, quiet=True, max_model_len=64, drafter="lookup", draft_tokens=24, draft_branches=branches, max_num_seqs=8
    )
    pretend(engine, wanted)
    most = engine.scheduler.same_rows
    if most is None:
        pytest.skip("here the kernel computes any number of rows")
    decoded: list[int] = []
    engine.core.on_step = lambda plan: None if plan.has_prompts else decoded.append(plan.tokens)
    assert [each.outputs for each in engine.generate(prompts, params)] == [each.outputs for each in wanted]
    assert len(prompts) < max(decoded) <= most
