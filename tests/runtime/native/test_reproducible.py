"""A reproducible engine: tokens and log probabilities of requests in company are those that they get alone, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.runtime import Engine, RequestOutput, RuntimeProblem, SamplingParams
from smelt.runtime.native import library

from ..drive import logits_in_pieces

pytestmark = pytest.mark.skipif(
    library.kernels(lambda _: None) is None, reason="this machine cannot run the compiled kernels"
)

# What is stored, of which architecture, and how the engine keeps keys and values.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ("llama", {}, {}),
    "bfloat16, int8 cache": ("llama", {}, {"kv_cache_dtype": "int8"}),
    "W4A16": ("qwen3", {"scheme": "W4A16", "group_size": 32}, {}),
    "W4A16, exact inputs": ("llama", {"scheme": "W4A16", "group_size": 32}, {"exact_inputs": True}),
    "W8A8": ("llama", {"scheme": "W8A8"}, {}),
    "W8A8, int8 cache": ("llama", {"scheme": "W8A8"}, {"kv_cache_dtype": "int8"}),
    "W4A4, int4 cache": ("llama", {"scheme": "W4A4", "group_size": 32, "kv_cache": "int4"}, {}),
    "NVFP4": ("llama", {"scheme": "NVFP4"}, {}),
    "windows and caps": ("gemma2", {}, {}),
    "experts": ("qwen3_moe", {"scheme": "W4A16", "group_size": 32}, {}),
    "layer norms": ("opt", {}, {}),
}


@pytest.fixture
def checkpoint(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> Callable[[str, dict[str, Any]], Path]:
    def build(architecture: str, quantize: dict[str, Any]) -> Path:
        path = tiny(architecture, torch.bfloat16)
        if not quantize:
            return path
        top = {"evaluate": False, "calibrate": {"samples": 4, "length": 16}}
        return run(recipe(path, top, rounding="nearest", **quantize), progress=False).checkpoint

    return build


def _requests(draw: random.Random) -> list[tuple[list[int], SamplingParams]]:
    common = [draw.randrange(4, 4096) for _ in range(40)]
    found = []
    for i in range(12):
        prompt = common[: draw.choice([0, 0, 20, 40])] + [
            draw.randrange(4, 4096) for _ in range(draw.choice([1, 5, 30]))
        ]
        kind = draw.choice(["greedy", "seeded", "seeded", "several", "beams"])
        params: dict[str, Any] = {"max_tokens": draw.choice([3, 12]), "ignore_eos": True, "logprobs": 3}
        if kind == "greedy":
            params |= {"temperature": 0, "prompt_logprobs": 2}
        elif kind == "beams":
            params |= {"beam_width": 3}
        else:
            params |= {"seed": i, "temperature": 0.9, "top_p": 0.95, "n": 2 if kind == "several" else 1}
        found.append((prompt, SamplingParams(**params)))
    return found


def _seen(output: RequestOutput) -> Any:
    return [(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CASES)
def test_company_changes_nothing(name: str, checkpoint: Callable[[str, dict[str, Any]], Path]) -> None:
    architecture, quantize, options = CASES[name]
    path = checkpoint(architecture, quantize)
    draw = random.Random(name)
    common: dict[str, Any] = {"reproducible": True, "quiet": True, "block_size": 16, **options}
    alone = Engine(path, max_num_seqs=3, max_num_batched_tokens=512, enable_prefix_caching=False, **common)
    block = alone.reservation.cache // alone.reservation.blocks
    crowded = Engine(
        path, max_num_seqs=9, max_num_batched_tokens=draw.choice([7, 48]), kv_cache_memory_bytes=7 * block, **common
    )
    requests = _requests(draw)
    wanted = [_seen(alone.generate([prompt], params)[0]) for prompt, params in requests]
    waiting, found = dict(enumerate(requests)), {}
    while waiting or crowded.has_work:
        if waiting and draw.random() < 0.4:
            i = min(waiting)
            prompt, params = waiting.pop(i)
            crowded.add_request(prompt, params, id=str(i))
        found |= {int(output.request_id): _seen(output) for output in crowded.step() if output.finished}
    assert crowded.scheduler.preemptions > 0
    for i, expected in enumerate(wanted):
        assert found[i] == expected


def test_without_it_company_does_change_something(checkpoint: Callable[[str, dict[str, Any]], Path]) -> None:
    """Else the test above would show nothing: in one piece and in others a prompt's logits differ."""
    from smelt.runtime.native.operators import NativeOperators
    from smelt.runtime.native.reproducible import ReproducibleOperators

    kernels = library.kernels(lambda _: None)
    assert kernels is not None
    path = checkpoint("llama", {"scheme": "W4A16", "group_size": 32})
    prompt = [torch.randint(4, 4096, (50,), generator=torch.Generator().manual_seed(0)).tolist()]
    whole, pieces = [[(0, 50)]], [[(0, 41)], *([(0, 1)] for _ in range(9))]
    for operators, same in ((NativeOperators, False), (ReproducibleOperators, True)):
        one, other = (logits_in_pieces(path, prompt, steps, operators(kernels, False))[0] for steps in (whole, pieces))
        assert torch.equal(one, other) == same


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"native": False}, {"compile": True}], ids=str)
def test_where_it_cannot_be_promised_it_is_refused(options: dict[str, Any], tiny: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeProblem, match="reproducible needs Smelt's compiled CPU kernels"):
        Engine(tiny("llama", torch.bfloat16), reproducible=True, quiet=True, **options)
