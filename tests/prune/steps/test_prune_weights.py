"""Zeros in weights: where they are, what the rest becomes, and what may follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress import Recipe, run
from smelt.compress.pipeline.plan import Plan
from smelt.prune.steps import weights as prune_weights
from smelt.prune.update.sparsegpt import sparsegpt
from smelt.runtime.decoder.model import Model
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.weights.checkpoint import Checkpoint
from torch import Tensor
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from ...tiny import CONFIGS
from .recipe import recipe_of


def _zeros(weight: Tensor) -> float:
    return (weight == 0).double().mean().item()


@pytest.mark.few(2)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_gets_its_pattern_and_nothing_else_changes(
    architecture: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny(architecture)
    result = run(recipe_of(model, tmp_path / "out", {"prune": {"structure": "2:4", "update": "sparsegpt"}}))
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, result.checkpoint))
    facts = json.loads((result.checkpoint / "smelt.json").read_text())
    pruned = {layer["name"] for layer in facts["steps"][0]["layers"]}
    assert pruned
    assert facts["reload"]["largest_difference"] is not None
    transposed = architecture == "gpt2"
    changed: set[str] = set()
    for (name, old), (other, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert name == other
        if torch.equal(old, new):
            continue
        changed.add(name.removesuffix(".weight"))
        rows = new.mT if transposed else new  # experts are fused: [experts, rows, columns]
        assert ((rows.reshape(-1, 4) != 0).sum(1) == 2).all(), name
    if any(".experts." in name for name in pruned):  # fused by transformers: two parameters a block
        pruned = {name for name in pruned if ".experts." not in name}
        assert sum(".experts." in name for name in changed) == 2 * 3
        changed = {name for name in changed if ".experts." not in name}
    assert changed == pruned


@torch.no_grad()
def test_each_layer_reads_what_the_pruned_layers_before_it_give(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The last layer of a block, from transformers' model with the others already pruned."""
    recipe = recipe_of(
        tiny(num_hidden_layers=2), tmp_path / "out", {"prune": {"structure": "2:4", "update": "sparsegpt"}}
    )
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    tokens = plan.calibration.tokens
    checkpoint = run(recipe).checkpoint
    original, pruned = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (recipe.model, checkpoint))
    for name in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"):
        seen: list[Tensor] = []
        handle = pruned.get_submodule(name).register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0])  # type: ignore[misc]
        )
        pruned(tokens, use_cache=False)
        handle.remove()
        inputs = seen[0].flatten(0, 1).double()
        weight = original.get_submodule(name).weight
        wanted, _ = sparsegpt(weight, (inputs.T @ inputs / len(inputs)).float(), prune_weights.Pattern(2, 4))
        found = pruned.get_submodule(name).weight
        assert ((found == 0) == (wanted == 0)).double().mean() > 0.999
        assert (found - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("settings", "by_row"),
    [
        ({"structure": "weights", "sparsity": 0.4, "score": "magnitude"}, False),
        ({"structure": "weights", "sparsity": 0.75, "score": "wanda"}, True),
        ({"structure": "weights", "sparsity": 0.5, "score": "wanda", "update": "sparsegpt"}, True),
        ({"structure": "weights", "sparsity": 0.5, "update": "sparsegpt"}, False),
        ({"structure": "4:8", "score": "magnitude"}, True),
    ],
)
def test_a_share_goes_of_each_linear_that_is_named(
    settings: dict[str, Any], by_row: bool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny("llama", torch.bfloat16)
    result = run(recipe_of(model, tmp_path / "out", {"prune": settings | {"ignore": ["re:.*v_proj"]}}))
    before, after = load_file(model / "model.safetensors"), load_file(result.checkpoint / "model.safetensors")
    share = settings.get("sparsity", 0.5)
    for name, weight in after.items():
        if "proj" not in name or "v_proj" in name:
            assert torch.equal(weight, before[name]), name
            continue
        assert abs(_zeros(weight) - share) < 0.005, name
        if by_row:
            rows = (weight == 0).double().mean(1)
            assert (rows - share).abs().max() < 0.01
        if "update" not in settings:
            assert torch.equal(weight[weight != 0], before[name][weight != 0])
    warnings = json.loads((result.checkpoint / "smelt.json").read_text())["steps"][0]["done"]
    assert any("save neither memory nor time" in sentence for sentence in warnings)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "rounding", ["nearest", "gptq", {"method": "signround", "iterations": 20, "learning_rate": 0.2}, "hqq"]
)
def test_quantizing_leaves_the_zeros(rounding: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=2)
    steps = [
        {"prune": {"structure": "2:4", "update": "sparsegpt"}},
        {"quantize": {"scheme": "W4A16", "group_size": 64, "rounding": rounding}},
    ]
    result = run(recipe_of(model, tmp_path / "out", *steps))
    stored = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    stored(torch.tensor([[1, 2, 3]]))  # compressed-tensors restores weights when they are first used
    for name, weight in stored.named_parameters():
        if name.endswith("proj.weight"):
            assert ((weight.reshape(-1, 4) != 0).sum(1) <= 2).all(), name


@pytest.mark.slow
def test_experts_that_no_token_reaches_are_reported(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("mixtral", num_local_experts=32)
    calibrate = {"samples": 1, "length": 16}
    result = run(recipe_of(model, tmp_path / "out", {"prune": {"structure": "2:4"}}, calibrate=calibrate))
    layers = json.loads((result.checkpoint / "smelt.json").read_text())["steps"][0]["layers"]
    assert any("reached this expert" in note for layer in layers for note in layer["notes"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"structure": "2:4", "sparsity": 0.5}, "fixes the sparsity; remove sparsity"),
        ({"structure": "weights"}, "structure weights needs sparsity"),
        ({"structure": "weights", "sparsity": 1.0}, "less than 1"),
        ({"structure": "2:4", "score": "influence"}, "score influence is not for 2:4"),
        ({"structure": "2:4", "score": "obs"}, "add update: sparsegpt"),
        ({"structure": "2:4", "update": "merge"}, "update merge is not for 2:4"),
        (
            {"structure": "4:2"},
            "neither blocks, attention, mlp, ffn, heads, hidden, experts, vocabulary, auto, weights nor a pattern",
        ),
        ({"structure": "blocks", "count": 1, "ignore": ["lm_head"]}, "not for blocks; remove ignore"),
    ],
)
def test_a_section_that_cannot_be_meant(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        recipe_of(tmp_path, tmp_path / "out", {"prune": settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"structure": "1:6", "update": "sparsegpt"},
            "steps.0.prune.structure: sparsegpt chooses 128 columns at a time",
        ),
        ({"structure": "2:4", "targets": ["lm_head"]}, "steps.0.prune.targets: selects no linear in a block"),
        ({"structure": "3:7"}, "steps.0.prune.structure: model.layers.0.self_attn.q_proj"),
        ({"structure": "2:4", "ignore": ["re:.*"]}, "steps.0.prune.targets: selects no linear in a block"),
        ({"structure": "2:4", "targets": ["qproj"]}, "steps.0.prune.targets: 'qproj' matches no linear"),
    ],
)
def test_what_does_not_fit_the_model_is_said_before_any_work(
    settings: dict[str, Any], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(), tmp_path / "out", {"prune": settings}))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]


def test_a_pattern_without_quotes_is_what_it_looks_like(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\noutput: o\nsteps:\n  - prune:\n      structure: 2:4\n")
    prune = Recipe.load(path).steps[0].prune
    assert prune is not None
    assert prune.structure == "2:4"
    prune = Recipe.load(path, ["steps.0.prune.structure=4:8"]).steps[0].prune
    assert prune is not None
    assert prune.structure == "4:8"


def test_what_would_lose_the_zeros_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    prune = {"prune": {"structure": "2:4"}}
    for after in (
        {"quantize": {"scheme": "W4A16", "group_size": 64, "transforms": ["rotate"]}},
        {"prune": {"structure": "blocks", "count": 1, "update": "merge"}},
    ):
        plan = Plan.make(recipe_of(tiny(), tmp_path / "out", prune, after))
        assert [problem for problem in plan.problems if "the zeros of steps.0 would be lost" in str(problem)]


@pytest.mark.few(1)
@pytest.mark.parametrize("together", [False, True])
def test_two_of_four_is_taken_by_torchs_sparse_tensors_and_the_runtimes_kernel(
    together: bool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """torch's own conversion to what sparse matrix units read gives the same weight back; the GPU's operators choose their kernel."""
    model = tiny("llama", torch.bfloat16)
    rounding: Any = {"method": "gptq", "sparsity": "2:4"} if together else "gptq"
    prune = {"prune": {"structure": "2:4", "update": "sparsegpt"}}
    quantize = {"quantize": {"scheme": "W4A16", "group_size": 64, "rounding": rounding}}
    steps = [quantize] if together else [prune, quantize]
    checkpoint = run(recipe_of(model, tmp_path / "out", *steps)).checkpoint
    served = Model(Checkpoint(checkpoint), GpuOperators(torch.float16, torch.device("cpu")))
    for role, linear in served.linears().items():
        assert ("2:4 sparse" in linear.explain()) == (role != "head"), role
    dense = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    for name, module in dense.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.detach().bfloat16()
            assert torch.equal(
                sparse_semi_structured_to_dense_cutlass(*sparse_semi_structured_from_dense_cutlass(weight)), weight
            )


def _shares(checkpoint: Path) -> dict[str, float]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {k: _zeros(t) for k, t in tensors.items() if k.endswith("_proj.weight")}


def test_owl_leaves_more_where_there_are_more_outliers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Against the paper's own arithmetic (Yin et al., 2024): shares of scores above five times the mean, by block."""
    recipe = recipe_of(
        tiny(), tmp_path / "out", {"prune": {"structure": "weights", "sparsity": 0.6, "allocation": "owl"}}
    )
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    whole = AutoModelForCausalLM.from_pretrained(recipe.model).eval()
    scores: dict[int, list[Tensor]] = {}

    def score(module: Any, inputs: tuple[Tensor, ...], index: int) -> None:
        norms = inputs[0].flatten(0, 1).double().norm(dim=0)
        scores.setdefault(index, []).append((module.weight.double().abs() * norms).flatten())

    for name, module in whole.named_modules():
        if name.endswith("_proj"):
            index = int(name.split(".")[2])
            module.register_forward_pre_hook(lambda m, x, index=index: score(m, x, index))
    with torch.no_grad():
        whole(plan.calibration.tokens, use_cache=False)
    # One norm is over all tokens here and a mean there, which is the same for all linears.
    ratios = torch.stack(
        [(torch.cat(each) > 5 * torch.cat(each).mean()).double().mean() for _, each in sorted(scores.items())]
    )
    scaled = (ratios - ratios.min()) / (ratios.max() - ratios.min()) * 0.16
    wanted = 1 - (scaled - scaled.mean() + 0.4)
    for key, share in _shares(run(recipe).checkpoint).items():
        assert abs(share - wanted[int(key.split(".")[2])]) < 0.01, key


def test_sensitivity_takes_what_is_asked_for_and_spares_what_matters(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny()
    whole = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():  # what this part adds is hardly felt
        whole.model.layers[1].mlp.down_proj.weight.mul_(0.01)
    whole.save_pretrained(model)
    step = {"prune": {"structure": "weights", "sparsity": 0.5, "allocation": "sensitivity", "score": "magnitude"}}
    shares = _shares(run(recipe_of(model, tmp_path / "out", step)).checkpoint)
    sizes = {k: t.numel() for k, t in load_file(model / "model.safetensors").items() if k in shares}
    total = sum(shares[k] * sizes[k] for k in shares) / sum(sizes.values())
    assert 0.5 <= total < 0.51
    for part in ("gate", "up", "down"):
        assert shares[f"model.layers.1.mlp.{part}_proj.weight"] == pytest.approx(0.7, abs=0.01)
    assert len({round(share, 2) for share in shares.values()}) > 3
