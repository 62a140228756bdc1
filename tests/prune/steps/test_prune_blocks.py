"""Taking blocks away: what is left against transformers' own model without them, scores against brute force."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import run
from smelt.compress.pipeline.plan import Plan
from smelt.models.directory.find import find_model
from smelt.models.structure.open_model import OpenModel
from smelt.prune.steps import blocks as prune_blocks
from smelt.prune.structure.drop_blocks import drop_blocks
from smelt.runtime import Engine, SamplingParams
from smelt.system.errors import SmeltError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...tiny import CONFIGS
from .recipe import recipe_of

TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))


def _prune(**settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": "blocks", **settings}}


def _record(checkpoint: Path, step: int = 0) -> dict[str, Any]:
    return json.loads((checkpoint / "smelt.json").read_text())["steps"][step]


def _blocks(model: nn.Module) -> nn.ModuleList:
    depth = model.config.num_hidden_layers  # type: ignore[union-attr]
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    return lists[0]


@torch.no_grad()
def _without(model: Path, removed: list[int]) -> Tensor:
    """transformers' logits when those blocks hand on what they are given."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for index in removed:
        block = _blocks(whole)[index]
        block.forward = lambda hidden, *_, **__: hidden
    return whole(TOKENS, use_cache=False).logits


@pytest.mark.few(3)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_what_is_left_computes_what_the_rest_did(architecture: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny(architecture)
    result = run(recipe_of(model, tmp_path / "out", _prune(score="influence", count=1)))
    removed = _record(result.checkpoint)["chosen"]["removed"]
    left = AutoModelForCausalLM.from_pretrained(result.checkpoint).eval()
    assert left.config.num_hidden_layers == 2
    assert len(_blocks(left)) == 2
    with torch.no_grad():
        found = left(TOKENS, use_cache=False).logits
    assert torch.equal(found, _without(model, removed))


@torch.no_grad()
def test_influence_is_that_of_transformers_hidden_states(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = recipe_of(tiny(num_hidden_layers=5), tmp_path / "out", _prune(score="influence", ratio=0.4))
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    tokens = plan.calibration.tokens
    chosen = _record(run(recipe).checkpoint)["chosen"]
    model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float64).eval()
    seen: list[tuple[Tensor, Tensor]] = []
    for block in _blocks(model):
        block.register_forward_hook(
            lambda _, args, out: seen.append((args[0], out[0] if isinstance(out, tuple) else out))
        )
    model(tokens, use_cache=False)
    wanted = [1 - nn.functional.cosine_similarity(a, b, dim=-1).mean().item() for a, b in seen]
    found = [chosen["influence"][0][str(index)] for index in range(5)]
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=1e-5)
    assert chosen["removed"] == sorted(sorted(range(5), key=lambda index: wanted[index])[:2])


@torch.no_grad()
def test_the_least_missed_block_is_found_one_after_another(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = recipe_of(tiny(num_hidden_layers=4), tmp_path / "out", _prune(score="loss", count=2))
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    tokens = plan.calibration.tokens
    chosen = _record(run(recipe).checkpoint)["chosen"]
    removed: list[int] = []
    for turn in range(2):
        losses = {}
        for index in set(range(4)) - set(removed):
            model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float64).eval()
            for gone in [*removed, index]:
                _blocks(model)[gone].forward = lambda hidden, *_, **__: hidden
            losses[index] = model(tokens, labels=tokens, use_cache=False).loss.item()
            assert abs(chosen["loss"][turn][str(index)] - losses[index]) < 1e-4
        removed.append(min(losses, key=lambda index: losses[index]))
    assert chosen["removed"] == sorted(removed)


def test_merging_keeps_what_removed_blocks_learned(tiny: Callable[..., Path]) -> None:
    model = OpenModel(find_model(str(tiny(num_hidden_layers=4))))
    left = drop_blocks(model, [1, 2], merging=True)
    key = "model.layers.0.mlp.up_proj.weight"
    first, second, third = (model.weights.load(key.replace("0", str(i))).double() for i in range(3))
    assert torch.allclose(left.weights.load(key).double(), second + third - first, atol=1e-6)
    last = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(left.weights.load(last), model.weights.load(last.replace("1", "3")))


def test_then_quantized_and_served(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=4, tie_word_embeddings=True)
    evaluate = {"windows": 4, "length": 32, "speed": False}
    steps = [_prune(count=1), {"quantize": {"scheme": "W4A16", "group_size": 32, "rounding": "gptq"}}]
    recipe = recipe_of(model, tmp_path / "out", *steps, evaluate=evaluate)
    result = run(recipe)
    facts = json.loads((result.checkpoint / "smelt.json").read_text())
    assert [step["step"] for step in facts["steps"]] == ["prune", "quantize"]
    assert facts["reload"]["largest_difference"] == 0
    assert len(facts["steps"][1]["layers"]) == 3 * 7
    candidate = result.report.candidates[0]
    assert candidate.text is not None
    assert any("was removed" in warning for warning in candidate.warnings)
    engine = Engine(result.checkpoint, dtype="float32")  # in bfloat16 two tokens are nearly as likely
    prompt = TOKENS[0, :12].tolist()
    served = engine.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0]
    theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 12:]
    assert served.outputs[0].token_ids == expected.tolist()


@pytest.mark.slow
def test_an_interrupted_search_goes_on(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(num_hidden_layers=4)
    steps = [_prune(score="loss", count=2), {"quantize": {"scheme": "W8A16", "rounding": "nearest"}}]
    quiet = run(recipe_of(model, tmp_path / "quiet", *steps))
    measured: list[int] = []
    loss = prune_blocks._Scores._loss

    def counted(self: Any, *args: Any) -> float:
        measured.append(1)
        if len(measured) == 6:
            raise KeyboardInterrupt
        return loss(self, *args)

    monkeypatch.setattr(prune_blocks._Scores, "_loss", counted)
    recipe = recipe_of(model, tmp_path / "out", *steps)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    assert not (tmp_path / "out" / "checkpoint.partial").exists()
    resumed = run(recipe)
    assert len(measured) == 4 + 3 + 1  # the one that was interrupted is measured again
    for name in ("model.safetensors", "config.json"):
        assert (resumed.checkpoint / name).read_bytes() == (quiet.checkpoint / name).read_bytes()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([_prune(count=3)], "steps.0.prune.count: leaves nothing: the model has 3 blocks"),
        ([_prune(ratio=0.1)], "steps.0.prune.ratio: 0.1 of 3 blocks is less than one"),
        (
            [{"quantize": {"scheme": "W8A16"}}, _prune(count=1)],
            "steps.1: quantized weights cannot be changed without quantizing them again; put quantize last",
        ),
        (
            [_prune(count=2), _prune(count=1)],
            "steps.1.prune.count: leaves nothing: the model has 1 block;",
        ),
        ([_prune(keep=[0, 3])], "steps.0.prune.keep: block 3 does not exist; the model has blocks 0 to "),
        ([_prune(keep=[0, 1, 2])], "steps.0.prune.keep: keeps all 3 blocks"),
        (
            [_prune(count=1), {"quantize": {"scheme": "W4A16", "group_size": 48}}],
            "steps.1.quantize.group_size:",
        ),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    steps: list[dict[str, Any]], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(), tmp_path / "out", *steps))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"structure": "blocks"},
        {"structure": "blocks", "count": 1, "ratio": 0.5},
        {"structure": "block"},
        {"structure": "blocks", "keep": [2, 0]},
        {"structure": "blocks", "keep": [0, 2], "score": "loss"},
    ],
)
def test_a_section_that_cannot_be_meant(settings: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"count, ratio or keep, and only one of them|neither blocks|block once, in order|remove score"
    ):
        recipe_of(tiny(), tmp_path / "out", {"prune": settings})


@pytest.mark.slow
def test_a_smaller_configuration_begins_with_what_the_recipe_maps(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Blocks by number, widths by size: a student of any smaller shape, made of its teacher."""
    model = tiny("llama", num_hidden_layers=5)
    widths = [
        {"prune": {"structure": "ffn", "size": 88, "score": "weight"}},
        {"prune": {"structure": "heads", "size": 2, "score": "weight"}},
        {"prune": {"structure": "hidden", "size": 96, "score": "weight"}},
    ]
    result = run(recipe_of(model, tmp_path / "deep", _prune(keep=[0, 2, 4])))
    assert _record(result.checkpoint)["chosen"] == {"removed": [1, 3]}
    small = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(small(TOKENS, use_cache=False).logits, _without(model, [1, 3]))
    narrow = AutoModelForCausalLM.from_pretrained(
        run(recipe_of(model, tmp_path / "narrow", _prune(keep=[0, 2, 4]), *widths)).checkpoint
    )
    config = narrow.config
    found = config.num_hidden_layers, config.intermediate_size, config.num_attention_heads, config.hidden_size
    assert found == (3, 88, 2, 96)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=narrow.dtype)
    # Every number is one of its teacher's, in the block that was mapped.
    for ours, theirs in ((0, 0), (1, 2), (2, 4)):
        mine, wanted = (
            each.model.layers[i].mlp.down_proj.weight.flatten() for each, i in ((narrow, ours), (whole, theirs))
        )
        assert torch.isin(mine, wanted).all()


def test_only_blocks_go_whose_removal_the_configuration_can_say(tiny: Callable[..., Path], tmp_path: Path) -> None:
    # Every second block has experts; of single blocks only the last can go.
    model = tiny("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2)
    result = run(recipe_of(model, tmp_path / "out", _prune(score="loss", count=1)))
    assert _record(result.checkpoint)["chosen"]["removed"] == [3]


def test_a_block_takes_in_only_those_of_its_kind(tiny: Callable[..., Path]) -> None:
    model = OpenModel(find_model(str(tiny("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2))))
    with pytest.raises(SmeltError, match="block 0 cannot be merged with block 1"):
        drop_blocks(model, [1, 2], merging=True)


@pytest.mark.parametrize("update", [None, "merge"])
def test_a_model_that_computes_with_its_blocks_numbers_is_refused(
    update: str | None, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    monkeypatch.setattr(prune_blocks._Scores, "least_influential", lambda *_: [0])
    monkeypatch.setattr("smelt.prune.structure.drop_blocks._traits", lambda _: [])
    with pytest.raises(SmeltError, match="depends on block numbers"):
        run(recipe_of(model, tmp_path / "out", _prune(count=1, update=update)))
    assert not (tmp_path / "out" / "checkpoint").exists()


def test_the_depth_by_its_other_name(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("gpt2")
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = config.pop("n_layer")
    (model / "config.json").write_text(json.dumps(config))
    left = AutoModelForCausalLM.from_pretrained(run(recipe_of(model, tmp_path / "out", _prune(count=1))).checkpoint)
    assert left.config.num_hidden_layers == 2


def test_blocks_of_another_kind_are_not_moved_together(tiny: Callable[..., Path]) -> None:
    # Every second block has experts; without block 1, block 2 would become one with experts.
    model = OpenModel(find_model(str(tiny("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2))))
    with pytest.raises(SmeltError, match="blocks of another kind"):
        drop_blocks(model, [1])
    assert len(drop_blocks(model, [1, 2]).anatomy.blocks) == 2


def test_the_plan_says_what_each_step_gets(tiny: Callable[..., Path], tmp_path: Path) -> None:
    plan = Plan.make(recipe_of(tiny(), tmp_path / "out", _prune(count=1), {"quantize": {"scheme": "W8A16"}}))
    said = plan.terminal()
    assert "step 0:  prune 1 of 3 blocks by influence" in said
    assert "step 1:  quantize 14 linears to W8A16" in said
    assert "no problems found" in said
