"""Transforms on whole models: they keep the function, they compose with every rounding, and they help where they should."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.pipeline.plan import Plan
from smelt.models.directory.directory import ModelDirectory
from smelt.models.steps.step import RunContext
from smelt.models.streaming.streamed import StreamedModel
from smelt.models.structure.open_model import OpenModel
from smelt.quant.blockwise.learned_rotation import learned_model_rotation
from smelt.quant.transforms.links import find_links
from smelt.quant.transforms.rotated_model import ModelRotation, Residual, rotated
from smelt.system.processes.process_group import Processes
from smelt.system.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...interruption import interrupt_after, note_parts
from ...tiny import CONFIGS, make_model, save_model

# Norms after attention and after the feed-forward part scale what is added to the hidden states; OPT's embedding is narrower.
NOT_ROTATED = {"gemma2": "norm after attention", "gemma3_text": "norm after attention", "olmo2": "norm after attention"}
NOT_ROTATED |= {"opt": "embedding is narrower"}
TOKENS = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(0))


def _opened(path: Path) -> OpenModel:
    return OpenModel(ModelDirectory(str(path), path))


def _logits(model: OpenModel, spill: Path) -> Tensor:
    """Logits in float64 of a model as it is opened."""
    streamed = StreamedModel(model.skeleton, model.weights, torch.float64, spill)
    store = streamed.final_hidden(TOKENS, Progress(False), "")
    logits = streamed.head()(store.read(slice(None)))
    store.close()
    return logits


@pytest.mark.few(4)
@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name not in NOT_ROTATED])
@pytest.mark.parametrize("rotates", [False, True])
def test_rotating_hidden_states_keeps_the_logits_in_float64(architecture: str, rotates: bool, tmp_path: Path) -> None:
    reference = make_model(architecture).double()
    reference.set_experts_implementation("eager")
    path = save_model(reference, tmp_path / "model")
    model = _opened(path)
    residual = Residual.find(model)
    rotation = (
        ModelRotation.random(residual, model.skeleton.hidden_size, 0) if rotates else ModelRotation.none(residual)
    )
    changed = rotated(model, residual, rotation)
    with torch.no_grad():
        expected = reference(TOKENS, use_cache=False).logits
    found = _logits(changed, tmp_path)
    # transformers' norms compute in float32 whatever they are given
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    first = model.anatomy.linears()[0]
    before, after = (m.weights.load(m.linears[first].key) for m in (model, changed))
    assert (before - after).norm() > 0.05 * before.norm()


@pytest.mark.few(2)
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "mixtral", "qwen3", "phi3"])
def test_learned_rotations_keep_the_logits_in_float64(architecture: str, tmp_path: Path) -> None:
    reference = make_model(architecture).double()
    reference.set_experts_implementation("eager")
    model = _opened(save_model(reference, tmp_path / "model"))
    residual = Residual.find(model)
    start = ModelRotation.random(residual, model.skeleton.hidden_size, 0)
    context = RunContext(torch.float32, TOKENS, 0, tmp_path / "journal", Progress(False), Processes())
    rotation = learned_model_rotation(model, residual, start, 3, 0, context)
    with torch.no_grad():
        expected = reference(TOKENS, use_cache=False).logits
    found = _logits(rotated(model, residual, rotation), tmp_path)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert rotation.hidden is not None
    assert start.hidden is not None
    assert (rotation.hidden.matrix() - start.hidden.matrix()).abs().max() > 0.01
    again = learned_model_rotation(
        model, residual, start, 1, 1, context
    )  # what the journal holds, whatever is asked for
    assert again.hidden is not None
    assert torch.equal(again.hidden.matrix(), rotation.hidden.matrix())


@pytest.mark.slow
def test_a_run_that_learns_rotations_continues_with_the_same_bytes(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama", torch.bfloat16)
    learning = {"method": "rotate", "learn": 10}
    found = {}
    for name, transforms in (("random", ["rotate"]), ("learned", [learning])):
        made = recipe(path, {"evaluate": False}, scheme="W4A4", group_size=32, transforms=transforms)
        found[name] = {p.name: p.read_bytes() for p in run(made, fresh=True).checkpoint.iterdir()}
    assert found["learned"]["model.safetensors"] != found["random"]["model.safetensors"]
    for parts in (1, 4):  # while it reads what is rotated, and while it quantizes
        interrupt_after(parts, monkeypatch, lambda: run(made, fresh=True))
        with monkeypatch.context() as patch:
            left = note_parts(patch, interrupt_at=0)
            assert {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()} == found["learned"]
        assert len(left) == 6 - parts  # of three blocks, each read and quantized once


def test_the_plan_counts_the_learning_of_rotations(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    path = tiny("llama")
    costs = [
        Plan.make(recipe(path, transforms=[{"method": "rotate", "learn": learn}])).cost.operations
        for learn in (0, 10, 20)
    ]
    assert costs[0] < costs[1]
    assert costs[2] - costs[1] == pytest.approx(
        10 * (8 * 128**3 + 3 * 2 * 2048 * 128**2 + 3 * 3 * 2 * 1024 * 128 * 32), rel=0.01
    )


@pytest.mark.parametrize("architecture", NOT_ROTATED)
def test_hidden_states_that_cannot_be_rotated_are_a_problem_with_its_reason(
    architecture: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    plan = Plan.make(recipe(tiny(architecture), transforms=["rotate"]))
    assert len(plan.problems) == 1
    assert NOT_ROTATED[architecture] in str(plan.problems[0])


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_routers_take_part_in_the_links_of_their_experts(architecture: str, tiny: Callable[..., Path]) -> None:
    model = _opened(tiny(architecture))
    links = {link.feeder: link for link in find_links(model.skeleton, model.anatomy.blocks[1])}
    norm = links["post_attention_layernorm"]
    assert len(norm.groups) == 4
    assert norm.others == ("mlp.gate",)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3", "opt", "gpt_neox"])
def test_scales_moved_within_blocks_keep_the_function(
    architecture: str, tmp_path: Path, recipe: Callable[..., Recipe]
) -> None:
    """At 8 bits a channel, what remains of the difference is rounding: it must not grow by much through transforms."""
    path = save_model(make_model(architecture), tmp_path / "model")
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(path)(TOKENS).logits
    distances = []
    for transforms in ([], ["smooth", "equalize", "awq"]):
        result = run(
            recipe(path, {"evaluate": False}, scheme="W8A16", group_size=32, transforms=transforms), fresh=True
        )
        with torch.no_grad():
            after = AutoModelForCausalLM.from_pretrained(result.checkpoint)(TOKENS).logits
        distances.append(((after - before).norm() / before.norm()).item())
    assert distances[1] < 2 * distances[0] < 0.2


@pytest.mark.few(1)
@pytest.mark.parametrize("rounding", ["nearest", "hqq", "gptq"])
@pytest.mark.parametrize(
    "transforms", [["fold_norms", "smooth"], ["rotate", "awq"], ["rotate", "equalize", "clip"]], ids="+".join
)
def test_any_list_composes_with_any_rounding(
    transforms: list[Any], rounding: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    """The reload check inside ``run`` compares the checkpoint in transformers with what was meant."""
    path = tiny("qwen3", torch.bfloat16)
    result = run(
        recipe(path, {"evaluate": False}, scheme="W8A16", group_size=32, rounding=rounding, transforms=transforms)
    )
    facts = json.loads((result.checkpoint / "smelt.json").read_text())
    assert facts["reload"]["through"] == "transformers"
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(path)(TOKENS).logits.float()
        after = AutoModelForCausalLM.from_pretrained(result.checkpoint)(TOKENS).logits.float()
    assert (after - before).norm() / before.norm() < 0.1


@pytest.mark.slow
def test_a_killed_run_with_transforms_continues_with_the_same_bytes(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What scales were moved into is in the journal, too: the block after an interruption reads the same inputs."""
    path = tiny("llama", torch.bfloat16)
    made = recipe(path, {"evaluate": False}, rounding="gptq", group_size=32, transforms=["rotate", "smooth", "awq"])
    quiet = {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()}
    interrupt_after(2, monkeypatch, lambda: run(made, fresh=True))
    again = {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()}
    assert again == quiet


def _with_outliers(model: torch.nn.Module, factor: float) -> torch.nn.Module:
    """The same function with activation outliers: some channels of each norm are larger, their readers' columns smaller."""
    with torch.no_grad():
        for block in model.model.layers:
            for norm, readers in (
                (block.input_layernorm, [block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj]),
                (block.post_attention_layernorm, [block.mlp.gate_proj, block.mlp.up_proj]),
            ):
                norm.weight[::31] *= factor
                for reader in readers:
                    reader.weight[:, ::31] /= factor
    return model


def test_smoothing_undoes_outliers_that_were_put_in(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    """Scaled channels change nothing in full precision and ruin int8 inputs; smoothing brings W8A8 back."""
    plain = make_model("llama")
    with torch.no_grad():
        before = plain(TOKENS).logits
        path = save_model(_with_outliers(plain, 256.0), tmp_path / "model")
        torch.testing.assert_close(plain(TOKENS).logits, before, rtol=1e-3, atol=1e-3)
    distances = []
    for transforms in ([], ["smooth"]):
        result = run(recipe(path, {"evaluate": False}, scheme="W8A8", transforms=transforms), fresh=True)
        with torch.no_grad():
            after = AutoModelForCausalLM.from_pretrained(result.checkpoint)(TOKENS).logits
        distances.append(((after - before).norm() / before.norm()).item())
    assert distances[1] < 0.35 * distances[0]


def test_a_rotation_after_scales_is_refused_with_the_order_that_works(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(SmeltError, match="put rotate before smooth"):
        run(recipe(tiny("llama"), transforms=["smooth", "rotate"]))


def test_linears_can_have_schemes_of_their_own(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    """transformers reloads a mixture of four formats, weight for weight; each is stored as it was asked for."""
    path = tiny("llama", torch.bfloat16)
    overrides = [
        {"targets": ["re:.*self_attn.(q|k|v)_proj"], "scheme": "W8A8"},
        {"targets": ["re:.*o_proj"], "scheme": "FP8_DYNAMIC"},
        {"targets": ["re:.*layers.1.mlp.(gate|up)"], "scheme": "W3A16", "group_size": 64, "rounding": "gptq"},
    ]
    result = run(recipe(path, scheme="W4A16", group_size=32, overrides=overrides))
    config = json.loads((result.checkpoint / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert sorted(g["format"] for g in config["config_groups"].values()) == [
        "float-quantized",
        "int-quantized",
        "pack-quantized",
        "pack-quantized",
    ]
    stored = load_file(result.checkpoint / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.mlp.up_proj.weight_packed"].shape == (256, 128 * 3 // 32)
    assert stored["model.layers.2.mlp.up_proj.weight_packed"].shape == (256, 128 * 4 // 32)
    labels = {layer.name: layer.scheme for layer in result.report.candidates[0].layers}
    assert labels["model.layers.1.mlp.gate_proj"] == "W3A16 g64"
    assert json.loads((result.checkpoint / "smelt.json").read_text())["reload"]["through"] == "transformers"


def test_linears_that_servers_fuse_must_be_stored_alike(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(SmeltError, match="read the same input, and servers fuse such linears"):
        run(recipe(tiny("llama"), overrides=[{"targets": ["re:.*k_proj"], "scheme": "W8A16"}]))


def test_of_several_overrides_the_last_decides(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    overrides = [
        {"targets": ["re:.*mlp.*"], "scheme": "W8A16"},
        {"targets": ["re:.*down_proj"], "scheme": "W2A16", "group_size": 64},
    ]
    made = recipe(tiny("llama"), {"evaluate": False}, group_size=32, overrides=overrides, rounding="nearest")
    labels = {layer.name: layer.scheme for layer in run(made, progress=False).report.candidates[0].layers}
    assert labels["model.layers.0.mlp.down_proj"] == "W2A16 g64"
    assert labels["model.layers.0.mlp.up_proj"].startswith("W8A16")
    assert labels["model.layers.0.self_attn.k_proj"] == "W4A16 g32"


def test_an_overrides_scheme_brings_its_own_rounding(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    path, name = tiny("llama", torch.bfloat16), "model.layers.0.mlp.down_proj.weight_packed"
    stored = {}
    for rounding in ({}, {"rounding": "nested"}, {"rounding": "nearest"}):
        overrides = [{"targets": ["re:.*down_proj"], "scheme": "W4in8", **rounding}]
        top = {"evaluate": False, "output": str(tmp_path / f"out-{len(stored)}")}
        made = recipe(path, top, scheme="W4A16", group_size=32, rounding="nearest", overrides=overrides)
        stored[str(rounding)] = load_file(run(made, progress=False).checkpoint / "model.safetensors")[name]
    own, nested, nearest = stored.values()
    assert torch.equal(own, nested)
    assert not torch.equal(own, nearest)


def test_seeds_choose_rotations(tmp_path: Path) -> None:
    model = _opened(save_model(make_model("llama"), tmp_path / "model"))
    residual = Residual.find(model)
    rotations = [ModelRotation.random(residual, 128, seed).hidden.matrix() for seed in (0, 0, 1)]  # type: ignore[union-attr]
    assert torch.equal(rotations[0], rotations[1])
    assert all(not torch.equal(a, b) for a, b in pairwise(rotations[1:]))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings", [{"group_size": 32}, {"scheme": "W4A8", "group_size": 32, "inputs": "static"}], ids=str
)
def test_signround_learns_blocks_within_a_run_and_continues(
    settings: dict[str, Any], tiny: Callable[..., Path], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closer to the original than rounding to nearest, transforms included; the same bytes after an interruption."""
    path = tiny("llama", torch.bfloat16)
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(path)(TOKENS).logits.float()
    distances = []
    for rounding in ("nearest", {"method": "signround", "iterations": 20, "batch": 4}):
        made = recipe(path, {"evaluate": False}, rounding=rounding, transforms=["rotate", "smooth"], **settings)
        result = run(made, fresh=True)
        with torch.no_grad():
            after = AutoModelForCausalLM.from_pretrained(result.checkpoint)(TOKENS).logits.float()
        distances.append((after - before).norm().item())
    assert distances[1] < distances[0]
    quiet = {p.name: p.read_bytes() for p in result.checkpoint.iterdir()}
    interrupt_after(1, monkeypatch, lambda: run(made, fresh=True))
    assert {p.name: p.read_bytes() for p in run(made).checkpoint.iterdir()} == quiet
