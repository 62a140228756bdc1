"""The search for a shape: what it counts against transformers' own models, and what it chooses against what it measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import run
from smelt.compress.pipeline.plan import Plan
from smelt.models.directory.find import find_model
from smelt.models.structure.open_model import OpenModel
from smelt.prune import search
from smelt.prune.structure import axes, shapes
from smelt.prune.structure.drop_blocks import drop_blocks
from smelt.prune.structure.shapes import Costs, SizeGrid, Sizes, parameters_of, shape_of
from smelt.prune.structure.slice_width import slice_width
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.measure.shape_time import ModelShape
from smelt.system.errors import SmeltError
from smelt.system.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM

from .recipe import recipe_of


def _prune(**target: Any) -> dict[str, Any]:
    return {"prune": {"structure": "auto", "target": target}}


def _numbers(path: Path) -> int:
    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters())


def _chosen(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "smelt.json").read_text())["steps"][0]["chosen"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("architecture", "rotated"), [("llama", False), ("qwen3", True), ("mixtral", False)])
def test_parameters_are_those_of_transformers_models(
    architecture: str, rotated: bool, tiny: Callable[..., Path]
) -> None:
    path = tiny(architecture)
    model = OpenModel(find_model(str(path)))
    grid = SizeGrid.of(model)
    assert all(len(levels) > 1 for levels in grid.levels.values())
    costs = Costs(model, grid, rotated=rotated)
    for sizes in list(grid)[:: max(1, len(list(grid)) // 12)]:
        config = AutoConfig.from_pretrained(path)
        config.num_hidden_layers, config.hidden_size, config.intermediate_size = sizes.blocks, sizes.hidden, sizes.ffn
        config.num_key_value_heads, config.num_attention_heads = sizes.heads, 2 * sizes.heads
        if rotated and sizes.hidden < 128:
            config.tie_word_embeddings = False
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        assert costs.parameters(sizes) == sum(p.numel() for p in whole.parameters()), sizes


@pytest.mark.slow
def test_what_it_leaves_keeps_to_its_target_and_is_served(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", torch.bfloat16, vocab_size=4096)
    steps = [_prune(params=0.8), {"quantize": {"scheme": "W8A16", "group_size": 32}}]
    checkpoint = run(recipe_of(model, tmp_path / "out", *steps)).checkpoint
    chosen = _chosen(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    sizes = Sizes(**chosen["sizes"])
    assert (config["num_hidden_layers"], config["hidden_size"]) == (sizes.blocks, sizes.hidden)
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (sizes.heads, sizes.ffn)
    assert chosen["parameters"] <= 0.8
    tried = {name: loss for name, loss in chosen["losses"].items() if name.count(" ") > 1}
    named = " ".join(f"{name} {size}" for name, size in chosen["sizes"].items())
    assert tried[named] == min(tried.values())
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(Engine(checkpoint).generate([list(range(5, 17))], sampling)[0].outputs[0].token_ids) == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", [{"params": 0.7}, {"latency": 0.8, "at": {"context": 32}}])
def test_blocks_that_differ_are_counted_and_timed_each(
    target: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """A dense block among mixtures: whichever of them go, what is left is no larger than it was said to be."""
    path = tiny("qwen3_moe", torch.bfloat16, num_hidden_layers=3, mlp_only_layers=[0], hidden_size=64)
    model = OpenModel(find_model(str(path)))
    grid = SizeGrid.of(model)
    costs = Costs(model, grid, rotated=False)
    assert costs.parameters(grid.whole) == _numbers(path)
    for depth in grid.levels["blocks"][1:]:
        gone = len(model.anatomy.blocks) - depth
        left = parameters_of(drop_blocks(model, range(3 - gone, 3)))
        assert costs.parameters(replace(grid.whole, blocks=depth)) >= left
    result = run(recipe_of(path, tmp_path / "out", _prune(**target)))
    chosen = _chosen(result.checkpoint)
    assert chosen["parameters"] == _numbers(result.checkpoint) / _numbers(path)
    if "params" in target:
        assert chosen["parameters"] <= 0.7
    else:
        spent = chosen["milliseconds"]
        named = f"ffn {grid.whole.hidden} {grid.whole.ffn}, blocks like"
        assert {f"{named} 0", f"{named} 1"} <= spent.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("architecture", "changes"), [("llama", {}), ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]})]
)
def test_time_is_that_of_the_parts(
    architecture: str, changes: dict[str, Any], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that takes a second for what surrounds the blocks and one for each number that a part which is there reads."""

    def seconds(given: Sequence[ModelShape], *_: Any, **__: Any) -> list[float]:
        return [_taken(shape, getattr(shape.config, "layer_parts", None)) for shape in given]

    monkeypatch.setattr(shapes, "decode_seconds", seconds)
    model = OpenModel(find_model(str(tiny(architecture, **changes))))
    grid = SizeGrid.of(model)
    costs = Costs(model, grid, rotated=False)
    costs.measure(1, 16, Progress(False))
    assert costs.seconds(grid.whole) == _taken(shape_of(model), None)
    fewer = grid.levels["ffn"][1]
    narrow = slice_width(model, axes.feed_forward(model), fewer)
    assert costs.seconds(replace(grid.whole, ffn=fewer)) == _taken(shape_of(narrow), None)
    blocks = grid.levels["blocks"][1]
    shorter = drop_blocks(narrow, range(blocks, len(model.anatomy.blocks)))
    assert costs.seconds(replace(grid.whole, ffn=fewer, blocks=blocks)) >= _taken(shape_of(shorter), None)


def _taken(shape: ModelShape, parts: list[str] | None) -> float:
    total = 1.0
    for name, size in shape.tensors.items():
        for part, inside in (("attention", ".self_attn."), ("mlp", ".mlp.")):
            if inside in name and (parts is None or parts[int(name.split(".")[2])] in ("all", part)):
                total += math.prod(size)
    return total


@pytest.mark.slow
def test_a_target_of_latency_is_measured_and_reported(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = recipe_of(
        tiny("llama", torch.bfloat16), tmp_path / "out", _prune(latency=0.9, at={"batch": 2, "context": 48})
    )
    result = run(recipe)
    record = json.loads((result.checkpoint / "smelt.json").read_text())["steps"][0]
    assert any("2 sequences with 48 tokens takes" in sentence for sentence in record["done"])
    whole = SizeGrid.of(OpenModel(find_model(recipe.model))).whole
    spent = record["chosen"]["milliseconds"]
    assert f"heads {whole.hidden} {whole.heads}" in spent
    assert Sizes(**record["chosen"]["sizes"]) != whole


@pytest.mark.slow
def test_interrupted_it_does_not_measure_again(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    quiet = run(recipe_of(model, tmp_path / "quiet", _prune(params=0.8)))
    measure, measured = search._mean_loss, []

    def stop(*args: Any) -> float:
        measured.append(args)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(search, "_mean_loss", stop)
    recipe = recipe_of(model, tmp_path / "out", _prune(params=0.8))
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    resumed = run(recipe)
    assert len(measured) == len(_chosen(resumed.checkpoint)["losses"]) + 1
    name = "model.safetensors"
    assert (resumed.checkpoint / name).read_bytes() == (quiet.checkpoint / name).read_bytes()


@pytest.mark.slow
def test_architectures_with_fixed_heads_lose_what_they_can(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("gpt_neox")
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(params=0.9))).checkpoint
    assert _numbers(checkpoint) <= 0.9 * _numbers(model)


@pytest.mark.parametrize(
    ("architecture", "target", "said"),
    [
        ("llama", {"params": 0.01}, "steps.0.prune.target: params: the smallest shape in the search has 0."),
        (
            "llama",
            {"latency": 0.5, "at": {"context": 4096}},
            "steps.0.prune.target: at.context is 4096, more than the model's context length of 128",
        ),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    architecture: str, target: dict[str, Any], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(architecture), tmp_path / "out", _prune(**target)))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"structure": "auto"}, "needs a target"),
        ({"structure": "auto", "target": {"params": 0.5, "latency": 0.5}}, "one of params and latency"),
        ({"structure": "auto", "target": {"params": 0.5}, "count": 1}, "chooses the amounts itself"),
        ({"structure": "ffn", "ratio": 0.5, "target": {"params": 0.5}}, "target is only for structure auto"),
    ],
)
def test_a_section_that_cannot_be_meant(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((SmeltError, ValueError), match=said):
        recipe_of(tmp_path, tmp_path / "out", {"prune": settings})
