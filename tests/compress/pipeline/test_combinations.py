"""Steps that nobody put together: what a plan accepts also runs, and what it writes is loaded and served."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.pipeline.plan import Plan
from smelt.quant.scheme_names import SUPPORTED
from smelt.runtime import Engine, SamplingParams

from ...tiny import CONFIGS

ARCHITECTURES = [name for name in CONFIGS if name != "gpt2"]  # which can be served, but not quantized
SCHEMES = sorted(SUPPORTED)
SHORT = {"tokens": 512, "length": 32, "batch": 4}
ROUNDINGS: list[Any] = [
    "nearest",
    "gptq",
    "hqq",
    "signround",
    {"method": "gptq", "sweeps": 0},
    {"method": "gptq", "activation_order": False},
    {"method": "gptq", "error_aware": 0.5},
]
RARELY: dict[str, list[Any]] = {
    "rounding": [*ROUNDINGS, *ROUNDINGS, "nested"],
    "group_size": [16, 32, 64, -1],
    "transforms": [["fold_norms"], ["rotate"], ["smooth"], ["awq", "clip"], ["rotate", "equalize"]],
    "kv_cache": ["fp8", "int8", "int4"],
    "embeddings": ["int8"],
    "ignore": [[]],
    "guard": [{"max_layer_error": 0.5}],
    "inputs": ["dynamic", "static", "static_asymmetric"],
    "train": [SHORT, SHORT | {"lora": 4}, SHORT | {"keep": "best"}],
    "overrides": [[{"targets": ["re:.*down_proj"], "scheme": scheme}] for scheme in SCHEMES],
}
PRUNED: list[dict[str, Any]] = [
    {"structure": "ffn", "ratio": 0.5},
    {"structure": "ffn", "ratio": 0.25, "allocation": "sensitivity", "update": "least_squares"},
    {"structure": "heads", "ratio": 0.5, "score": "taylor"},
    {"structure": "blocks", "count": 1},
    {"structure": "blocks", "count": 1, "update": "merge"},
    {"structure": "attention", "count": 1},
    {"structure": "mlp", "count": 1},
    {"structure": "experts", "count": 1},
    {"structure": "hidden", "ratio": 0.25},
    {"structure": "hidden", "ratio": 0.25, "score": "pca"},
    {"structure": "auto", "target": {"params": 0.7}},
    {"structure": "vocabulary", "corpus": "builtin"},
    {"structure": "2:4", "update": "sparsegpt"},
    {"structure": "weights", "sparsity": 0.5, "allocation": "owl"},
]
TRAINED: list[dict[str, Any]] = [
    SHORT,
    SHORT | {"keep": "best"},
    SHORT | {"loss": "jsd", "hidden": 1.0},
    SHORT | {"stored": 8},
]


def _steps(draw: random.Random) -> list[dict[str, Any]]:
    """Up to three steps, of which one at most is quantization, the last."""
    quantize: dict[str, Any] = {"scheme": draw.choice(SCHEMES)}
    quantize |= {name: draw.choice(values) for name, values in RARELY.items() if draw.random() < 0.2}
    if draw.random() < 0.15:
        quantize = {"scheme": "auto", "target": {"bits": draw.choice([4.5, 6, 8.2])}}
    before = [
        {"prune": draw.choice(PRUNED)} if draw.random() < 0.7 else {"distill": draw.choice(TRAINED)}
        for _ in range(draw.choice([0, 1, 1, 2]))
    ]
    return [*before, {"quantize": quantize}] if draw.random() < 0.8 or not before else before


def _accepted(draw: random.Random, tiny: Callable[..., Path], output: Path) -> Recipe:
    """The first recipe drawn that is valid and whose plan names no problem."""
    for _ in range(200):
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        data = {
            "model": str(tiny(draw.choice(ARCHITECTURES), dtype)),
            "output": str(output),
            "calibrate": {"samples": 4, "length": 32},
            "evaluate": {"windows": 2, "length": 32, "speed": False, "samples": 0},
            "steps": _steps(draw),
        }
        with contextlib.suppress(ValidationError, SmeltError):
            recipe = Recipe.model_validate(data)
            if not Plan.make(recipe).problems:
                return recipe
    raise AssertionError("plans accept none of 200 recipes")


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(60))
def test_what_a_plan_accepts_runs_and_is_served(number: int, tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = _accepted(random.Random(number), tiny, tmp_path / "out")
    checkpoint = run(recipe).checkpoint
    reload = json.loads((checkpoint / "smelt.json").read_text())["reload"]
    assert reload["through"] == "transformers", recipe.content()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (output,) = Engine(str(checkpoint), quiet=True).generate([[5, 6, 7, 8]], params)
    assert len(output.outputs[0].token_ids) == 4
