"""Keys and values rounded as a checkpoint's kv_cache_scheme says, against transformers with a cache of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, config_for, run
from smelt.quant.activations import ActivationRounding
from smelt.runtime import RuntimeProblem, SamplingParams
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.batch import Batch, Run
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.native import library
from smelt.runtime.native.operators import NativeOperators
from smelt.runtime.weights.checkpoint import Checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...tiny import SMELT_6M
from ..drive import engine, logits_in_pieces
from ..kernels.interpreter import DEVICE

DRAW = torch.Generator().manual_seed(0)
PROMPT = torch.randint(4, 4096, (28,), generator=DRAW).tolist()
PIECES = [[(0, 20)], *([(0, 1)] for _ in range(8))]
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
INT8 = FP8 | {"type": "int"}
TOKEN = INT8 | {"strategy": "group", "group_size": 32, "dynamic": True}
# What it says, and what holds it: codes, or numbers after rounding and back.
SCHEMES: dict[str, tuple[dict[str, Any], torch.dtype | None]] = {
    "fp8": (FP8, torch.float8_e4m3fn),
    "int8": (INT8, torch.int8),
    "fp8 by head": (FP8 | {"strategy": "attn_head"}, torch.float8_e4m3fn),
    "int4 by head": (INT8 | {"strategy": "attn_head", "num_bits": 4}, torch.int8),
    "fp8 by token": (TOKEN | {"type": "float"}, torch.float8_e4m3fn),
    "int8 by token": (TOKEN, torch.int8),
    "int4 by token": (TOKEN | {"num_bits": 4}, torch.int8),
    "int8 with a zero-point": (INT8 | {"symmetric": False}, None),
    "int4 by 16": (TOKEN | {"num_bits": 4, "group_size": 16}, None),
}


def _checkpoint(source: Path, scheme: dict[str, Any], target: Path, dtype: torch.dtype) -> Path:
    """Plain weights, and scales as compressed-tensors keeps them, of which each layer and head has its own."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    quantization = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": {}}
    config["quantization_config"] = quantization | {"kv_cache_scheme": scheme}
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    heads = config["num_key_value_heads"] if scheme["strategy"] == "attn_head" else 1
    for i in range(config["num_hidden_layers"] if not scheme["dynamic"] else 0):
        for j, what in enumerate("kv"):
            most = (4.0 + i + 2 * j) * torch.linspace(1, 1.5, heads)
            most = most.view(heads, 1, 1) if scheme["strategy"] == "attn_head" else most
            found = ActivationRounding.observed(QuantizationArgs(**scheme), -0.8 * most, most, dtype)
            tensors |= {f"model.layers.{i}.self_attn.{name}": part for name, part in found.stored(what).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@torch.no_grad()
def _expected(path: Path, dtype: torch.dtype, pieces: list[list[tuple[int, int]]]) -> Tensor:
    # By compressed-tensors' arithmetic the last bit of a key decides the code of a row's extreme; with Smelt's plug-in it does not.
    reference, done, cache, found = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, config=config_for(path)),
        0,
        None,
        [],
    )
    for ((_, count),) in pieces:
        given = torch.tensor([PROMPT[done : done + count]])
        step = reference(given, past_key_values=cache, use_cache=True)
        cache, done = step.past_key_values, done + count
        found.append(step.logits[0].float())
    return torch.cat(found)


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_transformers(name: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    scheme, kept = SCHEMES[name]
    path = _checkpoint(tiny("qwen3", num_hidden_layers=2), scheme, tmp_path / "rounded", torch.float32)
    # In single steps products differ in their last bits, and among 256 codes to a row some key lies near enough to an edge.
    pieces = [[(0, 28)]] if name == "int8 by token" else PIECES
    expected = _expected(path, torch.float32, pieces)
    found = logits_in_pieces(path, [PROMPT], pieces)[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    model = Model(Checkpoint(path), Operators(torch.float32))
    assert model.kept(torch.float32) == (kept or torch.float32)
    # It is the rounding that is compared, not what is left without it.
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert (logits_in_pieces(path, [PROMPT], pieces)[0] - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("name", ["fp8", "int8", "int4 by head", "int4 by token", "int8 with a zero-point"])
def test_the_cpu_kernels_attend_to_the_same_numbers(name: str, tmp_path: Path) -> None:
    kernels = library.kernels(lambda _: None)
    if kernels is None:
        pytest.skip("this machine cannot run the compiled kernels")
    path = _checkpoint(SMELT_6M, SCHEMES[name][0], tmp_path / "rounded", torch.bfloat16)
    expected = _expected(path, torch.bfloat16, PIECES)
    found = logits_in_pieces(path, [PROMPT], PIECES, NativeOperators(kernels, exact=False))[0]
    # Rotated in float32 and rounded once, a key may be another bfloat16 than transformers', and so another code; rounding to
    # int4 itself moves these logits by a quarter.
    assert (found - expected).norm() <= (4e-2 if "int4" in name else 2e-2) * expected.norm()
    model = Model(Checkpoint(path), NativeOperators(kernels, exact=False))
    single, store = Batch([Run([5], 3, [0], 16, 1)], 8), model.keys_values(2, 8, torch.bfloat16)
    assert model.stack is not None
    assert model.stack.takes(single, store) == (SCHEMES[name][1] is not None)


def test_the_cpu_kernels_attend_without_rotation(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Every fourth layer, whose keys and values are kept in bfloat16: torch stores them, and the kernels read its queries."""
    kernels = library.kernels(lambda _: None)
    if kernels is None:
        pytest.skip("this machine cannot run the compiled kernels")
    source = tiny("smollm3", torch.bfloat16, num_hidden_layers=4)
    path = _checkpoint(source, SCHEMES["int8 with a zero-point"][0], tmp_path / "rounded", torch.bfloat16)
    model = Model(Checkpoint(path), NativeOperators(kernels, exact=False))
    assert [layer.rope for layer in model.spec.layers].count(None) == 1
    expected = _expected(path, torch.bfloat16, PIECES)
    found = logits_in_pieces(path, [PROMPT], PIECES, NativeOperators(kernels, exact=False))[0]
    assert (found - expected).norm() <= 4e-2 * expected.norm()


@pytest.mark.parametrize("name", ["fp8 by head", "int8", "int4 by token"])
def test_a_gpu_attends_to_the_same_numbers(name: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = _checkpoint(tiny("qwen3", num_hidden_layers=1), SCHEMES[name][0], tmp_path / "rounded", torch.float32)
    pieces = [[(0, 27)], [(0, 1)]]
    expected = _expected(path, torch.float32, pieces)
    found = logits_in_pieces(path, [PROMPT], pieces, GpuOperators(torch.float32, DEVICE))[0]
    # Codes are multiplied in float16, and another last bit of a key may be another code.
    assert (found - expected).norm() <= (2e-2 if "token" in name else 2e-3) * expected.norm()


@pytest.mark.slow
def test_four_bits_generate_the_same_however_the_cache_is_cut(tmp_path: Path) -> None:
    """Blocks of another size add up in another order, which may decide no code."""
    path = _checkpoint(SMELT_6M, SCHEMES["int4 by token"][0], tmp_path / "rounded", torch.float32)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 4096, (n,), generator=draw).tolist() for n in range(3, 43, 4)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    found = [
        [
            output.outputs[0].token_ids
            for output in engine(path, block_size=size, kv_cache_memory_bytes=1 << 24).generate(prompts, params)
        ]
        for size in (8, 16)
    ]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, config=config_for(path))
    expected = [
        reference.generate(torch.tensor([p]), max_new_tokens=24, min_new_tokens=24, do_sample=False)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]
    assert found == [expected, expected]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kv_cache", "numbers"), [("fp8", "fp8"), ({"dtype": "int8", "scales": "head"}, "int8")])
def test_a_checkpoint_of_smelt_generates_what_transformers_generates(
    kv_cache: Any,
    numbers: str,
    tiny: Callable[..., Path],
    recipe: Callable[..., Recipe],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = run(recipe(tiny("llama"), {"evaluate": False}, group_size=32, kv_cache=kv_cache), progress=False).checkpoint
    reference = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    prompts = [PROMPT[:5], PROMPT[5:28]]
    running = engine(made, quiet=False, kv_cache_memory_bytes=1 << 22)
    message = capsys.readouterr().err
    assert f"keys and values are rounded to {numbers} with a fixed scale" in message
    outputs = running.generate(prompts, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        options: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        expected = reference.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        assert output.outputs[0].token_ids == expected
    with pytest.raises(
        RuntimeProblem, match=f"kv_cache_dtype is int4, but the checkpoint itself rounds .* to {numbers}"
    ):
        engine(made, kv_cache_dtype="int4")
    engine(made, kv_cache_dtype=numbers)


def test_what_cannot_be_served_is_said(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = _checkpoint(tiny(num_hidden_layers=1), INT8 | {"strategy": "attn_head"}, tmp_path / "rounded", torch.float32)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())

    def refused(sentence: str, scheme: dict[str, Any], without: str = "", **groups: Any) -> None:
        quantization = config["quantization_config"] | {"kv_cache_scheme": scheme, "config_groups": groups}
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        kept = {name: part for name, part in tensors.items() if not without or not name.endswith(without)}
        save_file(kept, path / "model.safetensors")
        with pytest.raises(RuntimeProblem, match=sentence):
            engine(path)

    head = INT8 | {"strategy": "attn_head"}
    refused("model.layers.0.self_attn: its v_scale is missing", head, "v_scale")
    refused("its k_scale has 2 elements, not 1", INT8)
    refused("its k_zero_point is missing", head | {"symmetric": False})
    refused("int8 with dynamic scales by token are not supported", INT8 | {"strategy": "token", "dynamic": True})
    refused("groups of 24 do not divide heads of 32 elements", TOKEN | {"group_size": 24})
    queries = {"targets": ["LlamaAttention"], "input_activations": FP8}
    refused("attention rounds inputs of LlamaAttention but no weights", head, attention=queries)
