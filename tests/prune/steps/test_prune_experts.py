"""Taking experts away: the smaller mixture against transformers' own with a router that cannot choose them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from smelt.compress import run
from smelt.compress.pipeline.plan import Plan
from smelt.runtime import Engine, SamplingParams
from torch import Tensor
from transformers import AutoModelForCausalLM

from .recipe import recipe_of

MIXTURES = ("mixtral", "qwen3_moe")
TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))


def _prune(**settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": "experts", "count": 1, **settings}}


def _kept(model: Path, checkpoint: Path) -> list[list[int]]:
    """Which experts stayed in each layer, by their last matrices."""
    whole, left = load_file(model / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    found: list[list[int]] = []
    for layer in range(3):
        before, after = (
            [
                t
                for key, t in sorted(each.items())
                if f"layers.{layer}." in key and key.endswith(("w2.weight", "down_proj.weight"))
            ]
            for each in (whole, left)
        )
        found.append([next(i for i, old in enumerate(before) if torch.equal(old, new)) for new in after])
    return found


def _router(layer: Any) -> Any:
    return getattr(layer, "mlp", None) or layer.block_sparse_moe


@pytest.mark.parametrize("architecture", MIXTURES)
@torch.no_grad()
def test_what_is_left_computes_what_routing_past_the_rest_does(
    architecture: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny(architecture)
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune())).checkpoint
    whole, left = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model, checkpoint))
    for layer, kept in zip(whole.model.layers, _kept(model, checkpoint), strict=True):
        gone, router = [number for number in range(4) if number not in kept], _router(layer).gate
        assert len(gone) == 1

        def never_chosen(_: Any, inputs: tuple[Tensor, ...], router: Any = router, gone: Any = gone) -> Any:
            """The router's own function, of logits that rule them out."""
            weight = router.weight.clone()
            logits = torch.nn.functional.linear(inputs[0].reshape(-1, weight.shape[1]), weight)
            logits[:, gone] = -torch.inf
            shares = logits.float().softmax(-1)
            values, indices = shares.topk(2, dim=-1)
            if getattr(router, "norm_topk_prob", True):
                values = values / values.sum(-1, keepdim=True)
            return logits, values.to(logits.dtype), indices

        router.register_forward_hook(lambda module, inputs, _, chosen=never_chosen: chosen(module, inputs))
    found, wanted = (each(TOKENS, use_cache=False).logits for each in (left, whole))
    assert (found - wanted).norm() / wanted.norm() < 1e-4


@torch.no_grad()
def test_the_expert_that_adds_least_goes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("mixtral")
    recipe = recipe_of(model, tmp_path / "out", _prune())
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    checkpoint = run(recipe).checkpoint
    whole = AutoModelForCausalLM.from_pretrained(model).eval()
    seen: list[Any] = []
    mixture = _router(whole.model.layers[0])
    mixture.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    whole(plan.calibration.tokens, use_cache=False)
    hidden, chosen, shares = seen[0]
    added = torch.zeros(4)
    for number in range(4):
        gate, up = mixture.experts.gate_up_proj[number].chunk(2)
        out = (torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ mixture.experts.down_proj[number].T
        added[number] = (out.norm(dim=-1) * (shares * (chosen == number)).sum(-1)).sum()
    assert set(range(4)) - set(_kept(model, checkpoint)[0]) == {int(added.argmin())}


@pytest.mark.few(1)
@pytest.mark.parametrize("score", ["frequency", "taylor", "path"])
def test_every_score_leaves_a_model_that_is_served(score: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [_prune(score=score), {"quantize": {"scheme": "W8A16", "group_size": 64}}]
    checkpoint = run(recipe_of(tiny("mixtral"), tmp_path / "out", *steps)).checkpoint
    assert json.loads((checkpoint / "config.json").read_text())["num_local_experts"] == 3
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(Engine(checkpoint).generate([TOKENS[0, :12].tolist()], sampling)[0].outputs[0].token_ids) == 4


@torch.no_grad()
def test_experts_that_no_token_reaches_go_first_and_are_reported(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("mixtral", num_experts_per_tok=1)
    whole = AutoModelForCausalLM.from_pretrained(model)
    for layer in whole.model.layers:
        gate = _router(layer).gate.weight
        gate[1], gate[2] = -gate[0], 0  # between one that is above zero and one that is below
    whole.save_pretrained(model)
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune())).checkpoint
    assert all(2 not in kept for kept in _kept(model, checkpoint))
    layers = json.loads((checkpoint / "smelt.json").read_text())["steps"][0]["layers"]
    assert [layer["notes"] for layer in layers] == [["no token of the calibration text reached expert 2"]] * 3
    assert [layer["error"] for layer in layers] == [0.0] * 3


@pytest.mark.parametrize(
    ("architecture", "step", "said"),
    [
        ("llama", _prune(), "steps.0.prune.structure: LlamaForCausalLM: has no mixture of experts"),
        ("mixtral", _prune(count=3), "steps.0.prune.count: leaves 1 of 4 experts, but every token is routed to 2"),
        ("mixtral", _prune(count=None, ratio=0.05), "steps.0.prune.ratio: removes none of 4 experts"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    architecture: str, step: dict[str, Any], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(architecture), tmp_path / "out", step))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]
