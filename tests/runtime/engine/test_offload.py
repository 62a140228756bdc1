"""Engines whose layers are read from a file for each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.runtime.decoder.linears.cpu import Int8Linear
from smelt.runtime.requests.output import RequestOutput

from ...compress.coded import compressed
from ...tiny import SMELT_6M, make_model, save_model
from ..drive import engine

PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (90, 9, 33)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], float]]:
    found = [output.outputs[0] for output in outputs]
    return [(each.token_ids, each.cumulative_logprob) for each in found]


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A8", "FP8_BLOCK"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture",
    ["llama", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "gpt_neox"))],
)
def test_tokens_are_those_of_weights_in_memory(
    tiny: Callable[..., Path], architecture: str, dtype: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # oneDNN's int8 products, which float32 uses in memory, round otherwise.
    monkeypatch.setattr(Int8Linear, "takes", lambda matrix, dtype: False)
    if scheme is not None and architecture == "gpt_neox":
        pytest.skip("its linears are not named as those that are rounded here")
    path = tiny(architecture, torch.bfloat16, **WIDE)
    if scheme is not None:
        compressed(path, scheme, 32 if scheme == "W4A16" else None)
    streamed = engine(path, dtype=dtype, offload="disk", kv_cache_memory_bytes=1 << 22)
    stream = streamed.model.stream
    assert stream is not None
    streamed.model.stream_layers(0)  # as if there were no memory for any
    stream = streamed.model.stream
    whole = engine(path, dtype=dtype, kv_cache_memory_bytes=1 << 22)
    whole.model.stack = None  # which adds in another order
    found, wanted = streamed.generate(PROMPTS, PARAMS), whole.generate(PROMPTS, PARAMS)
    assert said(found) == said(wanted)
    steps = stream.counts.steps
    assert steps >= 12
    assert stream.counts.bytes >= 0.5 * steps * (streamed.model.nbytes() - streamed.model.resident_bytes())
    assert "weights were read for each" in (streamed.offload_sentence() or "")


def test_layers_that_fit_stay(tiny: Callable[..., Path]) -> None:
    streamed = engine(tiny("llama", **WIDE), offload="disk", kv_cache_memory_bytes=1 << 22)
    assert streamed.offload_sentence() == "all layers stay in memory"
    assert said(streamed.generate(PROMPTS, PARAMS))


def test_some_layers_stay(tiny: Callable[..., Path]) -> None:
    path = tiny("llama", **WIDE)
    streamed = engine(path, offload="disk", kv_cache_memory_bytes=1 << 22)
    layer = (streamed.model.nbytes() - streamed.model.resident_bytes()) // 4  # of six layers two must be there at once
    streamed.model.stream_layers(int(2.5 * layer))
    stream = streamed.model.stream
    assert stream is not None
    assert stream.first == 2
    assert said(streamed.generate(PROMPTS, PARAMS)) == said(
        engine(path, kv_cache_memory_bytes=1 << 22).generate(PROMPTS, PARAMS)
    )


def test_a_step_that_fails_is_not_the_last(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = engine(tiny("llama", **WIDE), offload="disk", kv_cache_memory_bytes=1 << 22)
    streamed.model.stream_layers(0)
    wanted = said(streamed.generate(PROMPTS, PARAMS))
    reach = type(streamed.model.stream).reach

    def failing(stream: object, layer: int) -> None:
        reach(stream, layer)  # type: ignore[arg-type]
        if layer == 3:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(type(streamed.model.stream), "reach", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        streamed.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    assert said(streamed.generate(PROMPTS, PARAMS)) == wanted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "nvme"}, "it must be cpu or disk"),
        ({"offload": "cpu"}, "a GPU's to the host's memory"),
        ({"offload": "disk", "device": "cuda"}, "a CPU's weights can go to the disk"),
        ({"offload": "disk", "compile": True}, "offload is without compile"),
        ({"offload_directory": "/"}, "offload is not disk"),
        ({"offload": "disk", "offload_directory": "/nowhere"}, "/nowhere cannot be written to"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(RuntimeProblem, match=says):
        Engine(SMELT_6M, quiet=True, **options)


def test_no_file_is_left(tiny: Callable[..., Path], tmp_path: Path) -> None:
    streamed = engine(
        tiny("llama", **WIDE), offload="disk", offload_directory=str(tmp_path), kv_cache_memory_bytes=1 << 22
    )
    assert list(tmp_path.iterdir()) == []
    assert said(streamed.generate(PROMPTS, PARAMS))


_SCRIPT = """
import json, resource, sys
from smelt.runtime import Engine, SamplingParams
path, offload, limit, prompts = json.loads(sys.argv[1])
import torch, transformers  # what they take is not the model's
if limit:
    from smelt.system.hardware.machine import _data_bytes
    limit += _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
options = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 4 << 20, "quiet": True}
engine = Engine(path, offload=offload, **options)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
print(json.dumps([each.outputs[0].token_ids for each in engine.generate(prompts, params)]))
"""


@pytest.mark.slow
def test_a_model_of_four_times_the_memory_generates_the_same(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 16}
    path = save_model(make_model("llama", torch.bfloat16, **sizes), tmp_path / "model")
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))

    def run(offload: str | None, limit: int) -> subprocess.CompletedProcess[str]:
        given = json.dumps([str(path), offload, limit, PROMPTS[1:]])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-c", _SCRIPT, given],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
        )

    wanted = run(None, 0)
    assert wanted.returncode == 0, wanted.stderr
    assert run(None, weights // 4).returncode != 0
    found = run("disk", weights // 4)
    assert found.returncode == 0, found.stderr
    assert found.stdout == wanted.stdout
