"""Sharing channels and heads out over blocks: blocks of different sizes, against transformers' own model with the rest unread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import SmeltError, config_for, run
from smelt.compress.export import export
from smelt.compress.pipeline.plan import Plan
from smelt.runtime import Engine, SamplingParams
from torch import Tensor
from transformers import AutoModelForCausalLM

from .recipe import recipe_of
from .test_prune_units import columns_of, is_reader

TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
SHARED_OUT = {"ratio": 0.5, "allocation": "sensitivity"}


def _prune(structure: str = "ffn", **settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": structure, **SHARED_OUT, **settings}}


def _idle_block(model: Path, structure: str = "ffn", block: int = 1) -> Path:
    """Let one block's part add next to nothing, so that it should lose most."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if is_reader(key, structure) and f".{block}." in key:
            tensor *= 1e-3
    save_file(tensors, file, {"format": "pt"})
    return model


def _config(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text())


def _widths(checkpoint: Path, structure: str = "ffn") -> dict[int, int]:
    found = {}
    for file in checkpoint.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            if is_reader(key, structure):
                block = next(int(each) for each in key.split(".") if each.isdigit())
                found[block] = len(columns_of(key, tensor))
    return found


@torch.no_grad()
def _unread(model: Path, checkpoint: Path, structure: str, copy: Path) -> Path:
    """The whole model, with zeros where nothing reads a unit any more."""
    shutil.copytree(model, copy)
    (file,) = copy.glob("*.safetensors")
    whole, narrow = load_file(file), dict[str, Tensor]()
    for part in checkpoint.glob("*.safetensors"):
        narrow |= load_file(part)
    for key, tensor in whole.items():
        if is_reader(key, structure):
            before, after = columns_of(key, tensor), columns_of(key, narrow[key])
            kept = (before[:, None] == after[None]).all(-1)
            assert (kept.sum(0) == 1).all()
            before[~kept.any(1)] = 0
    save_file(whole, file, {"format": "pt"})
    return copy


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "structure"),
    [
        ("llama", "ffn"),
        ("opt", "ffn"),
        ("gpt2", "ffn"),
        ("qwen3_moe", "ffn"),
        ("mixtral", "ffn"),
        ("llama", "heads"),
        ("gemma2", "heads"),
    ],
)
@torch.no_grad()
def test_it_computes_what_the_rest_did_in_transformers_and_here(
    architecture: str, structure: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    wide = {"num_attention_heads": 8, "num_key_value_heads": 4} if structure == "heads" else {}
    model = _idle_block(tiny(architecture, **wide), structure)
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(structure))).checkpoint
    whole, left = _widths(model, structure), _widths(checkpoint, structure)
    assert len(set(left.values())) > 1
    assert left[1] == min(left.values())
    assert sum(left.values()) == sum(whole.values()) / 2
    wanted = AutoModelForCausalLM.from_pretrained(_unread(model, checkpoint, structure, tmp_path / "unread"))
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, config=config_for(checkpoint))
    logits, reference = (each.eval()(TOKENS, use_cache=False).logits for each in (theirs, wanted))
    assert (logits - reference).norm() <= 1e-4 * reference.norm()
    prompt = TOKENS[0, :12].tolist()
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    served = Engine(checkpoint, quiet=True).generate([prompt], sampling)[0].outputs[0].token_ids
    expected = wanted.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 12:]
    assert served == expected.tolist()


def test_transformers_alone_says_that_it_cannot(tiny: Callable[..., Path], tmp_path: Path) -> None:
    result = run(recipe_of(_idle_block(tiny()), tmp_path / "out", _prune()))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(result.checkpoint)
    card = (result.checkpoint / "README.md").read_text()
    assert 'from_pretrained("PATH", config=config_for("PATH"))' in card
    assert "vllm serve" not in card
    assert "no, its blocks differ in size" in card
    (note,) = [line for line in result.report.as_data()["models"][-1]["warnings"] if "differ in size" in line]
    assert "transformers, vLLM and llama.cpp do not" in note


@torch.no_grad()
def test_what_transformers_saves_of_it_loads_again(tiny: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = run(recipe_of(_idle_block(tiny()), tmp_path / "out", _prune())).checkpoint
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, config=config_for(checkpoint))
    theirs.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", config=config_for(tmp_path / "saved"))
    found, wanted = (each.eval()(TOKENS).logits for each in (again, theirs))
    assert torch.equal(found, wanted)


@pytest.mark.slow
def test_other_steps_follow(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Blocks that go take their sizes along, heads go beside, training keeps every size, and what is rounded reloads as it was."""
    wide = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = _idle_block(_idle_block(tiny("llama", torch.bfloat16, num_hidden_layers=4, **wide)), "heads", block=3)
    steps = [
        _prune(update="least_squares"),
        {"prune": {"structure": "blocks", "keep": [0, 1, 3]}},
        _prune("heads"),
        {"distill": {"tokens": 4 * 4 * 32, "length": 32, "batch": 4, "attention": 1.0}},
        {"quantize": {"scheme": "W4A16", "group_size": 8, "rounding": "gptq", "kv_cache": "int8"}},
    ]
    checkpoint = run(recipe_of(model, tmp_path / "out", *steps)).checkpoint
    said = json.loads((checkpoint / "smelt.json").read_text())
    (channels, groups), sizes = (
        (said["steps"][n]["chosen"]["units"] for n in (0, 2)),
        _config(checkpoint)["layer_sizes"],
    )
    assert [each["intermediate_size"] for each in sizes] == [channels[0], channels[1], channels[3]]
    assert [each["num_key_value_heads"] for each in sizes] == groups
    assert groups[2] == min(groups) < max(groups)
    assert said["reload"]["through"] == "transformers"
    assert "which blocks of different sizes need" in said["reload"]["sentence"]
    assert len(Engine(checkpoint, quiet=True).generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].outputs) == 1


def test_blocks_that_are_alike_again_are_plain(tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [_prune(multiple=64), {"prune": {"structure": "blocks", "keep": [0, 2]}}]
    model = _idle_block(_idle_block(tiny(), block=0), block=2)
    checkpoint = run(recipe_of(model, tmp_path / "out", *steps)).checkpoint
    assert json.loads((checkpoint / "smelt.json").read_text())["steps"][0]["chosen"]["units"] == [64, 256, 64]
    assert "layer_sizes" not in _config(checkpoint)
    assert _config(checkpoint)["intermediate_size"] == 64
    AutoModelForCausalLM.from_pretrained(checkpoint)
    again = run(recipe_of(checkpoint, tmp_path / "again", {"prune": {"structure": "ffn", "size": 32}})).checkpoint
    assert set(_widths(again).values()) == {_config(again)["intermediate_size"]}


def test_a_dense_block_among_mixtures_makes_none_uneven(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("qwen3_moe", mlp_only_layers=[0])
    result = run(recipe_of(model, tmp_path / "out", {"prune": {"structure": "ffn", "ratio": 0.5}}))
    assert "layer_sizes" not in _config(result.checkpoint)
    assert not [line for line in result.report.as_data()["models"][-1]["warnings"] if "differ in size" in line]


@pytest.mark.few(1)
@pytest.mark.parametrize("structure", ["attention", "mlp"])
@torch.no_grad()
def test_parts_can_go_from_blocks_that_differ(structure: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [_prune(), {"prune": {"structure": structure, "count": 1}}]
    checkpoint = run(recipe_of(_idle_block(tiny()), tmp_path / "out", *steps)).checkpoint
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, config=config_for(checkpoint))
    prompt = TOKENS[0, :12].tolist()
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    served = Engine(checkpoint, quiet=True).generate([prompt], sampling)[0].outputs[0].token_ids
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, 12:]
    assert served == expected.tolist()


def test_what_lost_its_part_does_not_pay_for_others(tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [{"prune": {"structure": "mlp", "count": 1}}, _prune()]
    checkpoint = run(recipe_of(_idle_block(tiny(num_hidden_layers=4), block=0), tmp_path / "out", *steps)).checkpoint
    parts, widths = _config(checkpoint)["layer_parts"], _widths(checkpoint)
    assert sum(width for block, width in widths.items() if parts[block] == "all") == 3 * 128


@torch.no_grad()
def test_what_is_set_later_reaches_its_blocks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = run(recipe_of(_idle_block(tiny()), tmp_path / "out", _prune())).checkpoint
    model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config_for(checkpoint)).eval()
    wanted = model(TOKENS).logits
    model.set_attn_implementation("eager")
    found = model(TOKENS, output_attentions=True)
    assert [each.shape for each in found.attentions] == [(2, 4, 40, 40)] * 3
    assert (found.logits - wanted).norm() <= 1e-4 * wanted.norm()


def test_calibration_text_can_be_its_own(tiny: Callable[..., Path], tmp_path: Path) -> None:
    uneven = run(recipe_of(_idle_block(tiny()), tmp_path / "out", _prune())).checkpoint
    calibrate = {"source": "self", "samples": 2, "length": 32}
    again = recipe_of(
        uneven, tmp_path / "again", {"quantize": {"scheme": "W8A16", "group_size": 16}}, calibrate=calibrate
    )
    assert _widths(uneven) == {
        block: facts["intermediate_size"] for block, facts in enumerate(_config(run(again).checkpoint)["layer_sizes"])
    }


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([_prune(allocation="owl")], "allocation owl is for single weights; expected uniform, sensitivity"),
        ([_prune("experts", ratio=0.5)], "allocation is for weights, channels and heads"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(steps: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        recipe_of(tmp_path, tmp_path / "out", *steps)


@pytest.mark.parametrize(
    ("changes", "steps", "said"),
    [
        (
            {},
            [_prune(), {"prune": {"structure": "ffn", "ratio": 0.5}}],
            "steps.1.prune.structure: LlamaForCausalLM: its blocks differ in their feed-forward channels already",
        ),
        (
            {},
            [_prune(multiple=64), {"quantize": {"scheme": "W4A16", "group_size": 128}}],
            "its 64 input columns are not divisible by group_size 128",
        ),
        ({"num_hidden_layers": 1}, [_prune()], "steps.0.prune.allocation: only one block has them"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    changes: dict[str, Any], steps: list[dict[str, Any]], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(**changes), tmp_path / "out", *steps))
    assert [problem for problem in plan.problems if said in str(problem)], [str(p) for p in plan.problems]


def test_formats_whose_tools_cannot_load_it_are_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [_prune(multiple=32), {"quantize": {"scheme": "W4A16", "group_size": 32}}]
    checkpoint = run(recipe_of(_idle_block(tiny()), tmp_path / "out", *steps)).checkpoint
    for to, output in (("gptq", "gptq"), ("gguf", "model.gguf")):
        with pytest.raises(SmeltError, match=f"its blocks differ in size .* no {to} loader supports"):
            export(str(checkpoint), to, tmp_path / output, progress=False)
        assert not (tmp_path / output).exists()
    export(str(checkpoint), "dense", tmp_path / "dense", progress=False)
    assert _widths(tmp_path / "dense") == {
        block: each["intermediate_size"] for block, each in enumerate(_config(checkpoint)["layer_sizes"])
    }


@pytest.mark.parametrize(
    "wrong", [[{"intermediate_size": 64}], [{}, {}, {}], [{"depth": 3}] * 3, [{"intermediate_size": 0}] * 3, "wide"]
)
def test_sizes_that_mean_nothing_are_refused(wrong: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny()
    (model / "config.json").write_text(json.dumps(_config(model) | {"layer_sizes": wrong}))
    with pytest.raises(SmeltError, match="layer_sizes must list, for each of 3 layers"):
        Engine(model, quiet=True)
    (problem,) = Plan.make(recipe_of(model, tmp_path / "out", {"quantize": {"scheme": "W8A16"}})).problems
    assert "layer_sizes must list, for each of 3 layers" in str(problem)
