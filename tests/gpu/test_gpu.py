"""Kernels and engine on a real GPU. ``benchmarks/gpu/run.sh`` checks more, with large shapes, and needs less installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.kernels.kernel import Case, problem
from smelt.runtime.kernels.registry import KERNELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = [
    pytest.param(case, id=f"{kernel.name}: {case.name}")
    for kernel in KERNELS
    for case in kernel.cases
    if not case.large
]


@pytest.mark.parametrize("case", CASES)
def test_a_case_agrees_with_float64_and_repeats_its_bits(case: Case) -> None:
    from smelt.runtime.kernels.targets import target_of

    device = torch.device("cuda")
    if case.targets and target_of(device).name not in case.targets:
        pytest.skip("this GPU does not multiply such numbers")
    assert problem(case, device, int(torch.randint(1 << 30, ()).item())) is None


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "NVFP4A16"])
def test_the_engine_generates_what_it_does_on_a_cpu(
    scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny("llama", torch.bfloat16, hidden_size=256, intermediate_size=256)
    made = run(recipe(path, {"evaluate": False}, scheme=scheme, rounding="nearest"), progress=False)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=20)
    prompts = [[5, 6, 7], list(range(10, 50))]
    expected = Engine(made.checkpoint, dtype="float32", quiet=True).generate(prompts, params)
    found = Engine(made.checkpoint, dtype="bfloat16", device="cuda", quiet=True).generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        # A random model's choices are close to each other, so that later tokens may differ; the first one's likelihood does not.
        token = other.completions[0].tokens[0]
        first, second = (c.completions[0].logprobs for c in (one, other))
        assert first is not None
        assert second is not None
        assert first[0][token] == pytest.approx(second[0][token], abs=0.2)
