"""Drafts on the kernels: the output is what it is without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import SamplingParams
from smelt.runtime.engine.setup import loading
from smelt.runtime.gpu import GpuOperators

from ..runtime.kernels.interpreter import DEVICE
from ..runtime.speculation.pretend import pretend
from .test_same_tests import on_kernels

if not torch.cuda.is_available():
    pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("options", [{"drafter": "lookup"}, {"drafter": "early-exit:1"}], ids=str)
@pytest.mark.parametrize("branches", [0, 3])
def test_tokens_are_those_without_a_drafter(
    options: dict[str, Any], branches: int, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama")
    prompts = [[1, 5, 9, 5, 9, 5, 9], [3, 4, 3, 4, 7, 3, 4, 8, 3, 4]]
    params = SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(loading, "_operators", lambda dtype, *_, **__: GpuOperators(dtype, DEVICE))
    alone = on_kernels(path).generate(prompts, params)  # a seed gives other tokens than on a CPU
    engine = on_kernels(path, draft_tokens=3, draft_branches=branches, **options)
    if options["drafter"] == "lookup":
        pretend(engine, alone)
    drafted = engine.generate(prompts, params)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in alone]
    assert engine.drafting is not None
    assert engine.drafting.total.verified > 0
    if branches:
        assert engine.drafting.total.on_branch > 0
