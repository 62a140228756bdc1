"""Taking the attention or the feed-forward part from blocks: against transformers' own model with that part's outputs at zero."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import run
from smelt.compress.pipeline.plan import Plan
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...tiny import CONFIGS, remove_parts
from .recipe import recipe_of

TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
PARTS = {"attention": "mlp", "mlp": "attention"}


def _prune(structure: str, **settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": structure, "count": 1, **settings}}


def _chosen(checkpoint: Path, step: int = 0) -> dict[str, Any]:
    return json.loads((checkpoint / "smelt.json").read_text())["steps"][step]["chosen"]


def _parts(checkpoint: Path) -> list[str]:
    return json.loads((checkpoint / "config.json").read_text())["layer_parts"]


def _left(structure: str, removed: list[int], depth: int = 3) -> list[str]:
    return [PARTS[structure] if index in removed else "all" for index in range(depth)]


@pytest.mark.few(2)
@pytest.mark.parametrize("structure", PARTS)
@pytest.mark.parametrize("architecture", CONFIGS)
@torch.no_grad()
def test_every_tool_computes_a_model_without_the_part(
    architecture: str, structure: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny(architecture)
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(structure))).checkpoint
    removed = _chosen(checkpoint)["removed"]
    assert _parts(checkpoint) == _left(structure, removed)
    whole, left = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model, checkpoint))
    remove_parts(whole, _left(structure, removed))
    found, wanted = (each(TOKENS, use_cache=False).logits for each in (left, whole))
    assert torch.equal(found, wanted)


def _blocks(model: nn.Module) -> nn.ModuleList:
    return model.model.layers  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("structure", PARTS)
@torch.no_grad()
def test_influence_is_what_a_block_without_the_part_gives_otherwise(
    structure: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = recipe_of(tiny(), tmp_path / "out", _prune(structure))
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    chosen = _chosen(run(recipe).checkpoint)
    whole, without = (AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float64).eval() for _ in range(2))
    remove_parts(without, [PARTS[structure]] * 3)
    seen: list[tuple[Tensor, Tensor]] = []

    def compare(block: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        index = list(_blocks(whole)).index(block)
        seen.append((_blocks(without)[index](*args, **kwargs), out))

    for block in _blocks(whole):
        block.register_forward_hook(compare, with_kwargs=True)
    whole(plan.calibration.tokens, use_cache=False)
    wanted = [1 - nn.functional.cosine_similarity(a, b, dim=-1).mean().item() for a, b in seen]
    found = [chosen["influence"][0][str(index)] for index in range(3)]
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=1e-5)


@torch.no_grad()
def test_the_least_missed_part_is_found_one_after_another(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = recipe_of(tiny(), tmp_path / "out", _prune("attention", score="loss", count=2))
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    chosen, removed = _chosen(run(recipe).checkpoint), list[int]()
    for turn in range(2):
        losses = {}
        for index in set(range(3)) - set(removed):
            model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float64).eval()
            remove_parts(model, _left("attention", [*removed, index]))
            tokens = plan.calibration.tokens
            losses[index] = model(tokens, labels=tokens, use_cache=False).loss.item()
            assert abs(chosen["loss"][turn][str(index)] - losses[index]) < 1e-4
        removed.append(min(losses, key=lambda index: losses[index]))
    assert chosen["removed"] == sorted(removed)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_runtime_leaves_them_out(dtype: torch.dtype, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", dtype, num_hidden_layers=4)
    steps = [
        _prune("blocks"),
        _prune("attention"),
        _prune("mlp"),
        {"quantize": {"scheme": "W8A16", "rounding": "gptq"}},
    ]
    checkpoint = run(recipe_of(model, tmp_path / "out", *steps)).checkpoint
    assert len(_parts(checkpoint)) == 3
    engine = Engine(checkpoint)
    assert len(engine.model.spec.cached_heads) == 2
    roles = [role.split(" ", 2)[2] for role in engine.model.linears() if role != "head"]
    assert {role: roles.count(role) for role in roles} == {
        "query, key, value": 2,
        "attention out": 2,
        "gate, up": 2,
        "down": 2,
    }
    prompt = TOKENS[0, :12].tolist()
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    served = engine.generate([prompt], sampling)[0]
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 12:]
    assert served.outputs[0].token_ids == expected.tolist()


def test_keys_and_values_of_what_is_left_are_rounded(tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [_prune("attention"), {"quantize": {"scheme": "W8A16", "kv_cache": "fp8"}}]
    checkpoint = run(recipe_of(tiny("llama", torch.bfloat16), tmp_path / "out", *steps)).checkpoint
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(Engine(checkpoint).generate([TOKENS[0, :12].tolist()], sampling)[0].outputs[0].token_ids) == 4


def test_a_config_that_calls_a_part_removed_that_is_there_is_refused(tiny: Callable[..., Path]) -> None:
    model = tiny()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"layer_parts": ["all", "mlp", "all"]}))
    with pytest.raises(RuntimeProblem, match=r"layers.1.self_attn.o_proj is not zero"):
        Engine(model)
    (model / "config.json").write_text(json.dumps(config | {"layer_parts": ["all", "half"]}))
    with pytest.raises(RuntimeProblem, match="layer_parts must have one of"):
        Engine(model)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ([_prune("attention", count=3)], "steps.0.prune.count: leaves nothing: the model has 3 attentions of blocks"),
        ([_prune("mlp", count=4)], "steps.0.prune.count: leaves nothing: the model has 3 feed-forward parts"),
        ([_prune("attention"), _prune("attention", count=2)], "steps.1.prune.count: leaves nothing: the model has 2"),
        ([_prune("attention"), _prune("blocks", update="merge")], "steps.1.prune.structure: parts of some blocks"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    step: list[dict[str, Any]], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(), tmp_path / "out", *step))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]
