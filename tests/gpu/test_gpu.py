"""Kernels and engine on a real GPU. ``benchmarks/gpu/run.sh`` checks more, with large shapes, and needs less installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.kernels.base.kernel import Case, problem
from smelt.runtime.kernels.tools.registry import KERNELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = [
    pytest.param(case, id=f"{kernel.name}: {case.name}")
    for kernel in KERNELS
    for case in kernel.cases
    if not case.large
]


@pytest.mark.parametrize("case", CASES)
def test_a_case_agrees_with_float64_and_repeats_its_bits(case: Case) -> None:
    from smelt.runtime.kernels.base.targets import target_of

    device = torch.device("cuda")
    if case.targets and target_of(device).name not in case.targets:
        pytest.skip("this GPU does not multiply such numbers")
    assert problem(case, device, int(torch.randint(1 << 30, ()).item())) is None


@pytest.mark.parametrize(
    ("architecture", "scheme", "changes"),
    [
        ("llama", "W4A16", {}),
        ("llama", "W8A8", {}),
        ("llama", "FP8_DYNAMIC", {}),
        ("llama", "NVFP4A16", {}),
        ("llama", "W4A16", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        ("gemma2", "W8A16", {}),
        ("mixtral", "W4A16", {}),
    ],
)
def test_the_engine_generates_what_it_does_on_a_cpu(
    architecture: str, scheme: str, changes: dict[str, Any], tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny(architecture, torch.bfloat16, hidden_size=256, intermediate_size=256, **changes)
    made = run(recipe(path, {"evaluate": False}, scheme=scheme, rounding="nearest"), progress=False)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=20)
    prompts = [[5, 6, 7], list(range(10, 110))]  # the second in pieces
    options = {"max_num_batched_tokens": 64, "quiet": True}
    expected = Engine(made.checkpoint, dtype="float32", **options).generate(prompts, params)
    found = Engine(made.checkpoint, dtype="bfloat16", device="cuda", **options).generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        # A random model's choices are close to each other, so that later tokens may differ; the first one's likelihood does not.
        token = other.outputs[0].token_ids[0]
        first, second = (c.outputs[0].logprobs for c in (one, other))
        assert first is not None
        assert second is not None
        assert first[0][token] == pytest.approx(second[0][token], abs=0.2)
