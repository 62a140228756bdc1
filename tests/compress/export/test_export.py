"""Checkpoints carried over into GPTQ and AWQ, against the formats' definitions, and against programs that read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.cli import app
from smelt.compress.export import export
from smelt.compress.verification.claims import Claims
from smelt.runtime.weights.checkpoint import Checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ..coded import Coded, compressed

PROMPT = torch.randint(4, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
DOWN = "model.layers.0.mlp.down_proj"


def restored_from_gptq(stored: dict[str, Tensor], name: str, bits: int, version: int) -> np.ndarray:
    """By the definition: bits in the order of a little-endian number down each column of ``qweight``."""
    codes = _numbers(stored[f"{name}.qweight"].T.contiguous(), bits).T
    zeros = _numbers(stored[f"{name}.qzeros"], bits) + (1 if version == 1 else 0)
    groups = stored[f"{name}.g_idx"].numpy()
    scales = stored[f"{name}.scales"].double().numpy()
    return ((codes - zeros[groups]) * scales[groups]).T


def restored_from_awq(stored: dict[str, Tensor], name: str) -> np.ndarray:
    """By the definition: of eight neighbours 0 to 7, a word holds 0 2 4 6 1 3 5 7, the first in its lowest bits."""
    place = [0, 4, 1, 5, 2, 6, 3, 7]
    each = {}
    for kind in ("qweight", "qzeros"):
        nibbles = _numbers(stored[f"{name}.{kind}"], 4)
        each[kind] = nibbles.reshape(len(nibbles), -1, 8)[:, :, place].reshape(len(nibbles), -1)
    scales = stored[f"{name}.scales"].double().numpy()
    repeat = len(each["qweight"]) // len(scales)
    return ((each["qweight"] - each["qzeros"].repeat(repeat, 0)) * scales.repeat(repeat, 0)).T


def _numbers(words: Tensor, bits: int) -> np.ndarray:
    rows = words.shape[0]
    flat = np.unpackbits(words.numpy().view(np.uint8).reshape(rows, -1), axis=1, bitorder="little")
    flat = flat[:, : flat.shape[1] // bits * bits].reshape(rows, -1, bits).astype(np.int64)
    return (flat << np.arange(bits)).sum(-1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("to", ["gptq", "gptq-v2"])
@pytest.mark.parametrize(("symmetric", "group"), [(True, 32), (False, 64), (False, -1)])
def test_gptq_says_what_the_checkpoint_said(
    bits: int, to: str, symmetric: bool, group: int, coded: Callable[..., Coded], tmp_path: Path
) -> None:
    version = 1 if to == "gptq" else 2
    source = coded(bits=bits, group=group, symmetric=symmetric, lowest=2 - version)
    notes = export(str(source.path), to, tmp_path / "out").notes
    assert ["use --to gptq-v2" in note for note in notes] == ([] if symmetric or version == 2 else [True])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(source.path / "model.safetensors")
    for name, meant in source.meant.items():
        assert np.array_equal(restored_from_gptq(stored, name, bits, version), meant), name
        assert torch.equal(stored[f"{name}.qweight"], before[f"{name}.weight_packed"].T), "the same bits, transposed"
        assert torch.equal(stored[f"{name}.scales"], before[f"{name}.weight_scale"].T)
    carried = {name for name in before if "_proj" not in name}
    assert all(torch.equal(stored[name], before[name]) for name in carried)
    assert set(stored) - carried == {
        f"{n}.{kind}" for n in source.meant for kind in ("qweight", "qzeros", "scales", "g_idx")
    }
    said = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert said == json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["checkpoint_format"] == ("gptq" if version == 1 else "gptq_v2")
    assert (said["bits"], said["group_size"], said["sym"], said["desc_act"], said["lm_head"]) == (
        (bits, group, symmetric, False, False)
    )
    assert "dynamic" not in said


@pytest.mark.parametrize(("symmetric", "group"), [(True, 32), (False, 64), (False, -1)])
def test_awq_says_what_the_checkpoint_said(
    symmetric: bool, group: int, coded: Callable[..., Coded], tmp_path: Path
) -> None:
    source = coded(group=group, symmetric=symmetric, lowest=0)
    assert export(str(source.path), "awq", tmp_path / "out").notes == []
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, meant in source.meant.items():
        assert np.array_equal(restored_from_awq(stored, name), meant), name
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }.items() <= said.items()


def test_columns_in_activation_order_stay_so(coded: Callable[..., Coded], tmp_path: Path) -> None:
    source = coded(order=True)
    export(str(source.path), "gptq", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, meant in source.meant.items():
        assert np.array_equal(restored_from_gptq(stored, name, 4, 1), meant), name
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text())["desc_act"] is True
    with pytest.raises(
        SmeltError, match="and 13 more: has its columns in activation order, which AWQ does not support"
    ):
        export(str(source.path), "awq", tmp_path / "awq")


def test_there_and_back_again(coded: Callable[..., Coded], tmp_path: Path) -> None:
    """Through every format and back to version 1, the runtime reads the same codes, scales and zero-points."""
    source = coded(symmetric=False)
    places = [source.path, *(tmp_path / to for to in ("gptq-v2", "awq", "gptq"))]
    for before, after in pairwise(places):
        export(str(before), after.name, after)
    first, last = Checkpoint(places[0]), Checkpoint(places[-1])
    for name in source.meant:
        a, b = first.matrix(name), last.matrix(name)
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.scale, b.scale)
        assert torch.equal(a.zero, b.zero)
        assert a.format == b.format


def test_layers_that_differ_or_are_plain_are_named(coded: Callable[..., Coded], tmp_path: Path) -> None:
    eight = {f"model.layers.1.self_attn.{n}_proj": {"bits": 8, "group": 64} for n in "qkv"}
    source = coded({DOWN: {"plain": True}, **eight, "model.layers.0.self_attn.o_proj": {"symmetric": False}})
    done = export(str(source.path), "gptq", tmp_path / "out")
    assert done.layers == 13
    assert "the field `dynamic` says; GPTQModel and vLLM read it" in done.notes[0]
    assert "use --to gptq-v2" in done.notes[1]
    said = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    for name in [*source.meant, DOWN, "model.layers.1.self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj"]:
        rules = [(key[:2], each) for key, each in said["dynamic"].items() if re.match(key[2:], name)]
        if name == DOWN:
            assert rules == [("-:", {})]
        elif name.endswith("0.self_attn.o_proj"):
            assert rules == [("+:", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False})]
        elif ".1.self_attn.o" in name or ".1.self_attn" not in name:
            assert rules == []
        else:
            assert rules == [("+:", {"bits": 8, "group_size": 64, "desc_act": False, "sym": True})]
    assert said["bits"] == 4
    read = Checkpoint(tmp_path / "out")
    assert read.matrix(DOWN).is_plain
    for name, meant in source.meant.items():
        assert np.array_equal(read.matrix(name).dense(torch.float64).numpy(), meant.astype(np.float16)), name


def test_what_is_plain_in_every_block_is_plain_in_transformers_too(coded: Callable[..., Coded], tmp_path: Path) -> None:
    source = coded({f"model.layers.{i}.mlp.down_proj": {"plain": True} for i in range(2)})
    assert export(str(source.path), "gptq", tmp_path / "out").notes == []
    said = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert said["dynamic"] == {r"-:^model\.layers\.\d+\.mlp\.down_proj$": {}}
    assert sorted(said["modules_in_block_to_quantize"][0]) == [
        *("mlp.gate_proj", "mlp.up_proj"),
        *(f"self_attn.{n}_proj" for n in "koqv"),
    ]
    export(str(source.path), "awq", tmp_path / "awq")
    awq = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    assert {DOWN, "lm_head"} <= set(awq["modules_to_not_convert"])


def test_scales_that_float16_rounds_are_counted(coded: Callable[..., Coded], tmp_path: Path) -> None:
    done = export(str(coded(dtype=torch.float32).path), "awq", tmp_path / "out")
    count = re.match(r"([\d,]+) of ([\d,]+) scales are not exact in float16", done.notes[0])
    assert count is not None
    assert 0.99 < int(count[1].replace(",", "")) / int(count[2].replace(",", "")) <= 1
    move = re.search(r"by at most (\S+) of its layer's largest", done.notes[0])
    assert move is not None
    assert 0 < float(move[1]) <= 2**-11
    # All of bfloat16's digits fit.
    assert export(str(coded(dtype=torch.bfloat16).path), "gptq", tmp_path / "brain").notes == []


@pytest.mark.parametrize(
    ("to", "said", "sentence"),
    [
        ("awq", {"bits": 8}, "has codes of 8 bits, but AWQ has only 4; use --to gptq"),
        ("awq", {"group": 16}, "groups of 16 columns, but AWQ kernels support 32, 64, 128"),
        (
            "awq",
            {"changed": {DOWN: {"group": 64}}},
            "groups of 32 and 64, but AWQ has one size for all layers; use --to gptq",
        ),
        ("gptq", {"symmetric": False, "lowest": 0}, "a zero-point at the lowest code, .* use --to gptq-v2"),
        ("gptq", {"bits": 5}, "codes of 5 bits, but GPTQ has 2, 3, 4 and 8"),
        ("gptq", {"group": 8}, "groups of 8 columns, but GPTQ loaders support"),
        ("gptq", {"scale": 1e5}, "scales above 65504, the maximum of float16"),
    ],
)
def test_what_a_format_cannot_say_is_said_before_any_work(
    to: str, said: dict[str, Any], sentence: str, coded: Callable[..., Coded], tmp_path: Path
) -> None:
    said = dict(said)
    large = said.pop("scale", None)
    source = coded(said.pop("changed", None), **said, **({"dtype": torch.float32} if large else {}))
    if large:
        tensors = load_file(source.path / "model.safetensors")
        tensors[f"{DOWN}.weight_scale"][3, 1] = large
        save_file(tensors, source.path / "model.safetensors")
    with pytest.raises(SmeltError, match=sentence):
        export(str(source.path), to, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", "NVFP4A16"])
@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_formats_that_hold_no_such_numbers(scheme: str, to: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny("llama", torch.bfloat16, num_hidden_layers=1), scheme)
    with pytest.raises(SmeltError, match=r"down_proj and 6 more: is stored as .*; use --to dense"):
        export(str(path), to, tmp_path / "out")


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"])
def test_dense_restores_what_transformers_restores(scheme: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny("llama", torch.bfloat16, num_hidden_layers=1), scheme)
    done = export(str(path), "dense", tmp_path / "out")
    dense = load_file(tmp_path / "out" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs(PROMPT)  # compressed-tensors restores weights when they are first used
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(dense[f"{name}.weight"], module.weight), name
    assert bool(done.notes) == (scheme in ("W8A8", "FP8_DYNAMIC"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.bfloat16
    if not done.notes:
        with torch.no_grad():
            assert torch.equal(plain(PROMPT).logits, theirs(PROMPT).logits)


def test_experts_keep_their_names(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = compressed(tiny("qwen3_moe", torch.bfloat16, num_hidden_layers=1), "W4A16", 32)
    export(str(path), "gptq", tmp_path / "out")
    first, last = Checkpoint(path), Checkpoint(tmp_path / "out")
    for name in ("model.layers.0.mlp.experts.3.down_proj", "model.layers.0.self_attn.q_proj"):
        assert torch.equal(first.matrix(name).values, last.matrix(name).values)
        assert torch.equal(first.matrix(name).scale.float(), last.matrix(name).scale.float())
    said = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert said["dynamic"] == {r"-:^model\.layers\.\d+\.mlp\.gate$": {}}


def test_a_run_is_its_checkpoint_and_outputs_are_not_overwritten(coded: Callable[..., Coded], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    coded().path.rename(tmp_path / "run" / "checkpoint")
    out = tmp_path / "out"
    export(str(tmp_path / "run"), "gptq", out)
    with pytest.raises(SmeltError, match="exists; choose another, or pass --fresh"):
        export(str(tmp_path / "run"), "awq", out)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"
    export(str(tmp_path / "run"), "awq", out, fresh=True)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    assert not (out / "quantize_config.json").exists(), "nothing of the earlier export is left"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(SmeltError, match="was not made by `smelt export`"):
        export(str(tmp_path / "run"), "awq", tmp_path / "mine", fresh=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out", "run"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("builtin:smelt-6m", "gptq"), "its weights are not quantized, .* quantize it first"),
        (
            ("builtin:smelt-6m", "gtpq"),
            "unknown format 'gtpq'; known: gptq, gptq-v2, awq, dense, gguf; did you mean gptq?",
        ),
        (("no/such/place", "awq"), "directory not found"),
    ],
)
def test_mistakes_are_reported(arguments: tuple[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match=sentence.replace("?", r"\?")):
        export(*arguments, tmp_path / "out")


def test_on_the_command_line(coded: Callable[..., Coded], tmp_path: Path) -> None:
    command = ["export", str(coded().path), "--to", "awq", "--output", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, [*command, "--type", "Q4_0"])
    assert refused.exit_code == 1
    assert refused.stderr == "smelt: type: only gguf has types, and the format is awq; remove it\n"
    done = CliRunner().invoke(app, [*command, "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["layers"] == 14
    assert "14 quantized layers" in CliRunner().invoke(app, [*command, "--fresh"]).stdout
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out"), "--json"])
    groups = {group["name"]: group for group in json.loads(shown.stdout)["groups"]}
    assert groups["model.layers.*.mlp.up_proj.weight"]["scheme"] == "awq W4A16 g32"
    assert groups["model.layers.*.mlp.up_proj.weight"]["numel"] == 2 * 256 * 128


@pytest.mark.slow
def test_gptqmodel_and_transformers_read_what_was_written(
    coded: Callable[..., Coded], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """GPTQModel's own kernels, and transformers' integrations of GPTQ and AWQ, restore the weights that were meant."""
    python = os.environ.get("SMELT_GPTQMODEL_PYTHON")
    if python is None:
        pytest.skip("set SMELT_GPTQMODEL_PYTHON to a Python that has gptqmodel, and optimum for transformers' GPTQ")
    mixed = {DOWN: {"plain": True}, **{f"model.layers.1.self_attn.{n}_proj": {"bits": 8, "group": 64} for n in "qkv"}}
    uniform = {f"model.layers.{i}.mlp.down_proj": {"plain": True} for i in range(2)}
    sources = {
        "gptq": coded(),
        "gptq-2": coded(bits=2, group=64),
        "gptq-8": coded(bits=8, group=-1),
        "gptq-v2": coded(symmetric=False),
        "gptq-ordered": coded(order=True),
        "gptq-mixed": coded(mixed),
        "gptq-v2-3": coded(bits=3, symmetric=False, lowest=0),
        "awq": coded(symmetric=False, lowest=0),
        "awq-symmetric": coded(uniform, group=64),
        "transformers-gptq": coded(uniform),
        "transformers-gptq-asymmetric": coded(symmetric=False),
        "transformers-awq": coded(uniform, symmetric=False),
    }
    checkpoints = {}
    for key, source in sources.items():
        to = re.sub(r"^transformers-", "", key)
        to = "gptq-v2" if to.startswith("gptq-v2") else to.partition("-")[0]
        export(str(source.path), to, tmp_path / key)
        checkpoints[key] = (str(tmp_path / key), "transformers" if key.startswith("transformers") else "gptqmodel")
    request = tmp_path / "request.json"
    result = tmp_path / "result.safetensors"
    request.write_text(json.dumps({"prompt": PROMPT.tolist(), "result": str(result), "checkpoints": checkpoints}))
    program = Path(__file__).with_name("gptqmodel_reads.py")
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONPATH")}
    with capfd.disabled():
        done = subprocess.run([python, program, request], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(result)
    for key, source in sources.items():
        weights = {name.partition("|")[2]: t for name, t in found.items() if name.startswith(f"{key}|")}
        logits = weights.pop("logits")
        assert weights.keys() == source.meant.keys(), key
        plain = AutoModelForCausalLM.from_pretrained(
            _plain_twin(source, tmp_path / f"{key}-plain"), dtype=torch.float32
        )
        for name, meant in source.meant.items():
            assert torch.equal(weights[name], torch.from_numpy(meant).half()), f"{key}: {name}"
        with torch.no_grad():
            expected = plain(PROMPT).logits
        assert (logits - expected).abs().max() <= 2e-2 * expected.abs().max(), key
        assert (logits - expected).norm() <= 5e-3 * expected.norm(), key


def _plain_twin(source: Coded, path: Path) -> Path:
    """A plain float16 model of the weights that were meant."""
    shutil.copytree(source.path, path)
    kept = {name: t for name, t in load_file(path / "model.safetensors").items() if ".weight_" not in name}
    kept |= {f"{name}.weight": torch.from_numpy(meant).half() for name, meant in source.meant.items()}
    save_file(kept, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("to", ["gptq", "dense"])
def test_a_rounded_cache_is_left_out_and_that_is_said(to: str, recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    made = run(recipe("builtin:smelt-6m", {"evaluate": False}, group_size=64, kv_cache="int8"), progress=False)
    assert any(name.endswith("k_scale") for name in load_file(made.checkpoint / "model.safetensors"))
    written = export(str(made.checkpoint), to, tmp_path / "exported")
    assert any("KV cache is quantized to int8, which the format cannot express" in note for note in written.notes)
    assert not any("k_scale" in name for name in load_file(tmp_path / "exported" / "model.safetensors"))
    file = export(str(made.checkpoint), "gguf", tmp_path / "model.gguf")
    assert any("quantized to int8" in note for note in file.notes)


def test_only_what_smelt_wrote_is_replaced_by_a_gguf_file(coded: Callable[..., Coded], tmp_path: Path) -> None:
    source, target = str(coded().path), tmp_path / "model.gguf"
    foreign = GGUFWriter(target, "llama")
    foreign.add_string("general.quantized_by", "somebody")
    foreign.write_header_to_file()
    foreign.write_kv_data_to_file()
    foreign.write_ti_data_to_file()
    foreign.close()
    for content in (target.read_bytes(), b"notes", b"GGUF", b"general.quantized_by Smelt"):
        target.write_bytes(content)
        with pytest.raises(SmeltError, match="was not made by `smelt export`"):
            export(source, "gguf", target, fresh=True)
        assert target.read_bytes() == content
    target.unlink()
    export(source, "gguf", target)
    first = target.read_bytes()
    with pytest.raises(SmeltError, match="pass --fresh"):
        export(source, "gguf", target)
    export(source, "gguf", target, fresh=True)
    assert target.read_bytes() == first


def test_an_export_claims_nothing_of_the_original(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Its files are others."""
    recipe = Recipe.model_validate(
        {
            "model": str(tiny(num_hidden_layers=2)),
            "output": str(tmp_path / "run"),
            "evaluate": False,
            "calibrate": {"samples": 4, "length": 16},
            "steps": [{"quantize": {"scheme": "W4A16", "group_size": 32, "rounding": "nearest"}}],
        }
    )
    export(str(run(recipe, progress=False).checkpoint), "dense", tmp_path / "dense", progress=False)
    with pytest.raises(SmeltError, match="claims nothing"):
        Claims.read(tmp_path / "dense")
