"""Engines with options that nobody chose together, and requests of every kind at once: what each request gets alone from a plain engine."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, RequestOutput, SamplingParams
from smelt.runtime.native import library
from smelt.runtime.requests.options import RequestOptions
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.system.errors import RuntimeProblem
from transformers import AutoModelForCausalLM

from ...compress.coded import compressed
from ...tiny import CONFIGS, make_model, save_model
from ..random_adapter import adapter_of
from ..speculation.head_reference import ReferenceHead
from ..speculation.test_exact import Alternating, perturbed

LONGEST = 96
WEIGHT_ONLY = ["W4A16", "W8A16", "NVFP4A16"]
ROUNDED_INPUTS = ["W8A8", "FP8_DYNAMIC", "W4A8"]
QUANTIZED = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3"]
ADAPTED = ["llama", "mistral", "qwen2"]
RARELY: dict[str, list[Any]] = {
    "policy": list(POLICIES),
    "admission": ["immediate"],
    "enable_prefix_caching": [False],
    "offload": ["disk"],
    "kv_cache_dtype": ["int8", "fp8"],
}
DIVISIONS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"cp": 2}]
DRAFTERS = ["near", "shallow", "head", "early-exit:2", "nested"]
LOGIT_ERROR = 2e-3


@dataclass
class Drawn:
    """A model, an engine's options, and those that must be the same in both.

    Attributes:
        plain: the model before it was quantized.
        path: what is served.
        architecture: its own.
        is_exact: whether the same bits are promised.
    """

    plain: Path
    path: Path
    architecture: str
    is_exact: bool
    same: dict[str, Any]
    options: dict[str, Any]


def _drafter(draw: random.Random, plain: Path, place: Path) -> str:
    where = draw.random()
    if where < 0.2:
        return "lookup"
    return f"{'lookup+' if where < 0.5 else ''}{_weights(draw, plain, place)}"


def _weights(draw: random.Random, plain: Path, place: Path) -> str:
    kind = draw.choice(DRAFTERS)
    if kind == "near":
        model = perturbed(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), 0.02)
        return str(save_model(model, place / kind))
    if kind == "shallow":
        return str(save_model(make_model("llama", torch.float32, num_hidden_layers=1), place / kind))
    if kind == "head":
        return str(ReferenceHead(AutoModelForCausalLM.from_pretrained(plain), vocabulary=4000).save(place / kind))
    return kind


def _drawn(draw: random.Random, tiny: Callable[..., Path], place: Path) -> Drawn:
    is_exact = library.kernels(lambda _: None) is not None and draw.random() < 0.4
    architecture = draw.choice(list(CONFIGS))
    path = tiny(architecture, torch.bfloat16 if is_exact else torch.float32)
    plain = Path(shutil.copytree(path, place / "plain"))
    if architecture in QUANTIZED and draw.random() < 0.4:
        # In float32 an input may be at the edge between two codes.
        scheme = draw.choice(WEIGHT_ONLY + ROUNDED_INPUTS if is_exact else WEIGHT_ONLY)
        compressed(path, scheme, 32 if scheme.startswith("W4") else None)
    options: dict[str, Any] = {
        "block_size": draw.choice([1, 4, 8, 16]),
        "max_num_batched_tokens": draw.choice([3, 16, 64, 512]),
        "max_num_seqs": draw.choice([3, 5, 16]),
    }
    options |= {name: draw.choice(values) for name, values in RARELY.items() if draw.random() < 0.2}
    if draw.random() < 0.1:
        options |= draw.choice(DIVISIONS)
    if draw.random() < 0.3:
        options |= {"host_cache_bytes": draw.choice([1 << 14, 1 << 22]), "swap": draw.choice(["auto", "swap"])}
        if draw.random() < 0.4:
            (place / "host").mkdir()
            options["host_cache_directory"] = str(place / "host")
    if draw.random() < 0.6:
        options |= {"drafter": _drafter(draw, plain, place), "draft_tokens": draw.choice(["auto", 1, 2, 4])}
        if draw.random() < 0.4:
            options["draft_branches"] = draw.choice([1, 2, 4])
    same: dict[str, Any] = {"max_model_len": LONGEST, "quiet": True, "dtype": "bfloat16" if is_exact else "float32"}
    if is_exact:  # also these decide which sums are rounded how
        same |= {"reproducible": True, "block_size": options["block_size"]}
        same |= {name: options[name] for name in ("kv_cache_dtype",) if name in options}
    else:
        options.pop("kv_cache_dtype", None)
    return Drawn(plain, path, architecture, is_exact, same, options)


def _accepted(draw: random.Random, tiny: Callable[..., Path], place: Path) -> Drawn:
    """The first that an engine accepts, with a cache of which some are starved."""
    for i in range(100):
        (place / str(i)).mkdir()
        drawn = _drawn(draw, tiny, place / str(i))
        try:
            with closing(Engine(drawn.path, **drawn.same | drawn.options)) as engine:
                found = engine.reservation
        except RuntimeProblem:
            continue
        least = -(-LONGEST // (drawn.options["block_size"] * drawn.options.get("cp", 1)))
        blocks = draw.choice([3 * least + 4, 6 * least, 40 * least])
        drawn.options["kv_cache_memory_bytes"] = blocks * (found.cache // found.blocks)
        return drawn
    raise AssertionError("an engine accepts none of 100 configurations")


def _params(draw: random.Random, seed: int) -> SamplingParams:
    found: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 8, 24]), "ignore_eos": draw.random() < 0.7}
    kind = draw.choice(["greedy", "seeded", "seeded", "several", "beams", "grammar"])
    if kind == "beams":
        return SamplingParams(max_tokens=min(found["max_tokens"], 8), beam_width=3, n=draw.choice([1, 3]))
    if kind == "greedy":
        found["temperature"] = 0
    else:
        found |= {"seed": seed, "temperature": draw.choice([0.7, 1.0, 1.5])}
        if draw.random() < 0.5:
            found |= {"top_p": draw.choice([0.5, 0.9]), "top_k": draw.choice([0, 5, 50])}
        if draw.random() < 0.2:
            found["min_p"] = 0.05
        if kind == "several":
            found["n"] = draw.choice([2, 3])
    if kind == "grammar":
        found["constraint"] = Alternating()
    else:
        if draw.random() < 0.3:
            found |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3}
        if draw.random() < 0.2:
            found["logit_bias"] = {7: 3.0, 9: -5.0}
        if draw.random() < 0.1:
            found["allowed_token_ids"] = range(0, 4096, 3)
    rarely: dict[str, Callable[[], Any]] = {
        "min_tokens": lambda: draw.randrange(found["max_tokens"] + 1),
        "stop_token_ids": lambda: tuple(range(draw.randrange(8), 4096, 16)),
        "stop": lambda: ("a", "th"),
        "logprobs": lambda: draw.choice([0, 3]),
        "prompt_logprobs": lambda: draw.choice([0, 2]),
    }
    return SamplingParams(**found, **{name: value() for name, value in rarely.items() if draw.random() < 0.25})


def _requests(draw: random.Random) -> Iterator[tuple[list[int], SamplingParams, RequestOptions]]:
    common = [draw.randrange(4, 4096) for _ in range(40)]
    for seed in range(10):
        kind = draw.choice(["short", "long", "shared", "repeating"])
        if kind == "repeating":
            prompt = [draw.randrange(4, 4096) for _ in range(draw.choice([1, 3, 5]))] * draw.choice([2, 8])
        else:
            prompt = common[: draw.choice([8, 16, 40])] if kind == "shared" else []
            count = draw.choice([17, 40, 70] if kind == "long" else [1, 8])
            prompt = prompt + [draw.randrange(4, 4096) for _ in range(count)]
        yield prompt, _params(draw, seed), {"priority": draw.randrange(3), "predicted_tokens": draw.choice([None, 3])}


def _with_adapter(draw: random.Random, drawn: Drawn, place: Path, engines: list[Engine]) -> bool:
    if drawn.architecture not in ADAPTED or draw.random() < 0.4:
        return False
    adapter_of(drawn.plain, place / "adapter", target_modules=["q_proj", "down_proj"])
    try:
        for engine in engines:
            engine.load_adapter("other", place / "adapter")
    except RuntimeProblem:  # not on several processes, for one
        return False
    return True


def _seen(output: RequestOutput) -> Any:
    return output.error, [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in output.outputs]


def _numbers(output: RequestOutput) -> list[float]:
    """All log probabilities, the likeliest of each place first, since equal ones may change places."""
    places = [*(output.prompt_logprobs or []), *(place for each in output.outputs for place in each.logprobs or [])]
    return [number for place in places for number in sorted((place or {}).values(), reverse=True)]


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(60))
def test_every_request_gets_what_it_gets_alone(number: int, tiny: Callable[..., Path], tmp_path: Path) -> None:
    draw = random.Random(number)
    drawn = _accepted(draw, tiny, tmp_path)
    requests = list(_requests(draw))
    with (
        closing(Engine(drawn.path, enable_prefix_caching=False, **drawn.same)) as plain,
        closing(Engine(drawn.path, **drawn.same | drawn.options)) as crowded,
    ):
        adapted = _with_adapter(draw, drawn, tmp_path, [plain, crowded])
        waiting, wanted = list[tuple[str, Any, Any, Any]](), dict[str, RequestOutput]()
        for i, (prompt, params, options) in enumerate(requests):
            adapter: RequestOptions = {"adapter": "other"} if adapted and draw.random() < 0.5 else {}
            wanted[str(i)] = plain.generate([prompt], params, **adapter)[0]
            waiting.append((str(i), prompt, params, options | adapter))
        found: dict[str, RequestOutput] = {}
        for _ in range(5000):
            if not waiting and not crowded.has_work:
                break
            if waiting and draw.random() < 0.4:
                name, prompt, params, options = waiting.pop(0)
                crowded.add_request(prompt, params, id=name, **options)
            found |= {output.request_id: output for output in crowded.step() if output.finished}
        for name, expected in wanted.items():
            assert _seen(found[name]) == _seen(expected), drawn
            one, other = _numbers(found[name]), _numbers(expected)
            if drawn.is_exact:
                assert one == other, drawn
            assert all(math.isclose(a, b, abs_tol=LOGIT_ERROR) for a, b in zip(one, other, strict=True)), drawn
        crowded.cache.check([])
        assert crowded.cache.free == crowded.cache.blocks
