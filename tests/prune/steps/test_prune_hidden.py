"""Making the residual stream narrower: against transformers' own model with the rest of the stream held at zero."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.pipeline.plan import Plan
from smelt.models.steps import parts
from smelt.prune.score.pca import Directions
from smelt.prune.steps import hidden as prune_hidden
from smelt.runtime import Engine, SamplingParams
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...tiny import CONFIGS
from .recipe import recipe_of

TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
# The size of their heads follows from the hidden size.
FIXED = ("opt", "gpt_neox", "gpt2")
# Norms of their blocks' outputs: hidden states cannot be rotated.
POST_NORMS = ("gemma2", "gemma3_text", "olmo2")


def _prune(**settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": "hidden", "ratio": 0.25, **settings}}


def _kept(whole: nn.Module, narrow: nn.Module) -> Tensor:
    """Which channels stayed, by the columns of the queries' matrix (of the first block)."""

    def first(model: nn.Module) -> Tensor:
        found = next(m.weight for n, m in model.named_modules() if n.endswith(("q_proj", "qkv_proj")))
        assert isinstance(found, Tensor)
        return found.T

    same = (first(whole)[:, None] == first(narrow)[None]).all(-1)
    assert (same.sum(0) == 1).all()
    return same.any(1).nonzero().flatten()


@pytest.mark.few(2)
@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name not in FIXED])
@torch.no_grad()
def test_what_is_left_computes_what_a_stream_without_the_rest_does(
    architecture: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny(architecture)
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(score="activation"))).checkpoint
    whole, narrow = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model, checkpoint))
    kept = _kept(whole, narrow)
    assert len(kept) == 96
    gone = torch.ones(128, dtype=torch.bool)
    gone[kept] = False
    for name, module in whole.named_modules():  # what norms divide by, and give, is that of the channels that are left
        if "norm" in name and module.weight.shape == (128,) and "q_norm" not in name and "k_norm" not in name:
            small = narrow.get_submodule(name)

            def as_the_narrow(
                _: nn.Module, inputs: tuple[Tensor, ...], out: Tensor, small: nn.Module = small
            ) -> Tensor:
                found = torch.zeros_like(out)
                found[..., kept] = small(inputs[0][..., kept])
                return found

            module.register_forward_hook(as_the_narrow)
    if whole.config.tie_word_embeddings:  # Gemma's embedding is larger to make up for its scale, and is the head, too
        whole.lm_head.weight = nn.Parameter(torch.zeros_like(whole.lm_head.weight))
        whole.lm_head.weight[:, kept] = narrow.lm_head.weight
    whole.model.embed_tokens.weight = nn.Parameter(whole.model.embed_tokens.weight * ~gone)
    entering = whole.model.embed_tokens(TOKENS), narrow.model.embed_tokens(TOKENS)
    assert torch.allclose(entering[0][..., kept], entering[1], rtol=1e-3, atol=1e-3)
    found, wanted = (each(TOKENS, use_cache=False).logits for each in (narrow, whole))
    assert (found - wanted).norm() / wanted.norm() < 2e-3


def _energies(recipe: Recipe) -> tuple[nn.Module, list[Tensor]]:
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    whole = AutoModelForCausalLM.from_pretrained(recipe.model).eval()
    seen: list[Tensor] = []
    for name, module in whole.named_modules():
        if "norm" in name and module.weight.shape == (128,):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1).double()))
    with torch.no_grad():
        whole(plan.calibration.tokens, use_cache=False)
    return whole, seen


def test_the_channels_with_the_largest_shares_stay(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = recipe_of(tiny(), tmp_path / "out", _prune(score="activation"))
    whole, seen = _energies(recipe)
    checkpoint = run(recipe).checkpoint
    shares = sum((each.square().sum(0) / each.square().sum() for each in seen), torch.zeros(128))
    kept = _kept(whole, AutoModelForCausalLM.from_pretrained(checkpoint))
    assert set(kept.tolist()) == set(shares.topk(96).indices.tolist())


def test_norms_give_what_is_left_the_size_that_it_had(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = recipe_of(tiny(), tmp_path / "out", _prune(score="activation"))
    whole, seen = _energies(recipe)
    checkpoint = run(recipe).checkpoint
    narrow = AutoModelForCausalLM.from_pretrained(checkpoint)
    kept = _kept(whole, narrow)
    names = [n for n, m in whole.named_modules() if "norm" in n and getattr(m, "weight", TOKENS).shape == (128,)]
    for name, read in zip(sorted(names, key=lambda n: (n == "model.norm", n)), seen, strict=True):
        share = (read[:, kept].square().sum(1) / read.square().sum(1)).mean()
        wanted = whole.get_submodule(name).weight[kept] * (share * 128 / 96).sqrt()
        assert torch.allclose(narrow.get_submodule(name).weight, wanted.float(), rtol=1e-4)


def test_directions_are_those_of_a_singular_value_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    directions = Directions(24)
    for part in rows.split(100):
        directions.add(part.view(4, 25, 24))
    rotation, shares = directions.rotation()
    scaled = rows.double() / rows.double().norm(dim=1, keepdim=True)
    _, values, vectors = torch.linalg.svd(scaled)
    assert torch.allclose(shares, values.square() / values.square().sum(), atol=1e-6)
    assert torch.allclose((rotation.T @ vectors.T).abs(), torch.eye(24).double(), atol=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "mixtral"])
@torch.no_grad()
def test_directions_that_nothing_uses_cost_nothing(
    architecture: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Hidden states of which only 64 of 128 directions are ever written are as good with half of them."""
    model = tiny(architecture)
    whole = AutoModelForCausalLM.from_pretrained(model).eval()
    basis = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(1)))[0][:, :64]
    onto = basis @ basis.T
    for name, parameter in whole.named_parameters():
        if "embed_tokens" in name:
            parameter.copy_(parameter @ onto)
        elif name.removesuffix(".weight").endswith(("o_proj", "down_proj")):  # of mixtures, three dimensions
            parameter.copy_(onto @ parameter)
    whole.save_pretrained(model)
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(ratio=0.5))).checkpoint
    narrow = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    assert narrow.config.hidden_size == 64
    found, wanted = (each(TOKENS, use_cache=False).logits for each in (narrow, whole))
    # A token of a mixture may be sent to another expert that is as likely.
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("score", ["pca", "taylor", "weight"])
def test_then_quantized_and_served(score: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("qwen3", torch.bfloat16)  # tied
    steps = [_prune(score=score, ratio=0.5), {"quantize": {"scheme": "W4A16", "group_size": 64}}]
    checkpoint = run(recipe_of(model, tmp_path / "out", *steps)).checkpoint
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["hidden_size"], config["head_dim"]) == (64, 32)
    assert config["tie_word_embeddings"] == (score != "pca")
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(Engine(checkpoint).generate([TOKENS[0, :12].tolist()], sampling)[0].outputs[0].token_ids) == 4


@pytest.mark.slow
def test_interrupted_after_the_directions_it_goes_on(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.bfloat16)
    quiet = run(recipe_of(model, tmp_path / "quiet", _prune()))
    save, saved = prune_hidden.save_tensors, []

    def stop(path: Path, *args: Any) -> None:
        save(path, *args)
        saved.append(path.name)
        if len(saved) == 1:
            raise KeyboardInterrupt

    for module in (parts, prune_hidden):
        monkeypatch.setattr(module, "save_tensors", stop)
    recipe = recipe_of(model, tmp_path / "out", _prune())
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    resumed = run(recipe)
    assert saved == ["stays.safetensors", "shares.safetensors", "changed.safetensors"]
    name = "model.safetensors"
    assert (resumed.checkpoint / name).read_bytes() == (quiet.checkpoint / name).read_bytes()


@pytest.mark.parametrize(
    ("architecture", "step", "said"),
    [
        ("gpt2", _prune(), "steps.0.prune.structure: GPT2LMHeadModel"),
        ("opt", _prune(score="activation"), "steps.0.prune.structure: OPTForCausalLM"),
        ("olmo2", _prune(), "steps.0.prune.structure: its hidden states cannot be rotated"),
        ("llama", _prune(ratio=0.99), "steps.0.prune.ratio: leaves none of 128"),
        ("llama", _prune(ratio=0.01), "steps.0.prune.ratio: removes none of 128"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    architecture: str, step: dict[str, Any], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(architecture), tmp_path / "out", step))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]
