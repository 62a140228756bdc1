"""The engine's configuration: fields or keywords, checked at once and without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from smelt.runtime import Engine, EngineConfig, RuntimeProblem
from smelt.runtime.engine.setup.config import _AS_IN_VLLM


def test_keywords_replace_fields(tiny: Callable[..., Path]) -> None:
    given = EngineConfig(max_model_len=32, block_size=8, quiet=True)
    found = Engine(tiny("llama"), given, max_num_seqs=3, block_size=4)
    assert found.config == EngineConfig(max_model_len=32, block_size=4, max_num_seqs=3, quiet=True)
    assert (found.max_model_len, found.cache.block_size, found.scheduler.max_num_seqs) == (32, 4, 3)
    assert given.block_size == 8
    assert Engine(tiny("llama"), given).cache.block_size == 8


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"unknown engine option 'max_lenght'; known: dtype, .*did you mean max_model_len\?"
    ):
        Engine("nowhere", max_lenght=5)
    with pytest.raises(TypeError, match="vLLM's tensor_parallel_size is tp here"):
        Engine("nowhere", tensor_parallel_size=2)


def test_what_vllms_names_are_called_here_exists() -> None:
    assert {*_AS_IN_VLLM.values()} <= {field.name for field in fields(EngineConfig)}
    assert not {*_AS_IN_VLLM} & {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_model_len": 1}, "max_model_len is 1; it must be at least 2"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be at least 1"),
        ({"memory_utilization": 1.5}, "memory_utilization is 1.5; it must be above 0 and at most 1"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype is 'int3'; it must be auto, int8, fp8, int4"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be auto, float32, bfloat16, float16"),
    ],
)
def test_values_are_checked_before_anything_is_read(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RuntimeProblem, match=problem):
        EngineConfig(**options)
    with pytest.raises(RuntimeProblem, match=problem):
        Engine("nowhere", EngineConfig(), **options)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from smelt.runtime import EngineConfig; from smelt.runtime.fusions import Fusions;"
        " EngineConfig(fusions=Fusions().without('norm')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_command_refuses_a_wrong_option_at_once(command: str) -> None:
    """Before torch, which takes seconds, and before the checkpoint is looked for."""
    code = (
        f"import sys; sys.argv = ['smelt', {command!r}, 'nowhere', '--kv-cache-dtype', 'int3']\n"
        "from smelt.compress.__main__ import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "False\n"
    assert "smelt: kv_cache_dtype is 'int3'; it must be auto, int8, fp8, int4" in done.stderr
