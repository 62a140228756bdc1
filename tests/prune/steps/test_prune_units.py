"""Taking feed-forward channels and heads away: the smaller model against transformers' own with those unread."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import run
from smelt.compress.pipeline.plan import Plan
from smelt.prune.structure.axes import Span
from smelt.runtime import Engine, SamplingParams
from smelt.system.errors import SmeltError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...tiny import CONFIGS
from .recipe import recipe_of

TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
FFN_READERS = ("mlp.down_proj.weight", "dense_4h_to_h.weight", "mlp.c_proj.weight", "fc2.weight", "w2.weight")
EXPERT_READERS = re.compile(r"experts\.\d+\.(w2|down_proj)\.weight$")
HEAD_READERS = ("self_attn.o_proj.weight",)
# The size of their heads follows from the hidden size; OLMo 2 norms all heads together, so none can be read as zero.
NO_HEADS = ("opt", "gpt_neox", "gpt2", "olmo2")


def _prune(**settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": "ffn", "ratio": 0.5, **settings}}


def _heads(**settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": "heads", "ratio": 0.5, **settings}}


def is_reader(key: str, structure: str) -> bool:
    endings = FFN_READERS if structure == "ffn" else HEAD_READERS
    return key.endswith(endings) or (structure == "ffn" and EXPERT_READERS.search(key) is not None)


def _tensors(directory: Path) -> dict[str, Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def columns_of(key: str, tensor: Tensor) -> Tensor:
    """What a matrix reads, one row for each; GPT-2's are stored the other way round."""
    return tensor if ".c_proj." in key else tensor.T


def _gone(whole: dict[str, Tensor], narrow: dict[str, Tensor], structure: str) -> dict[str, Tensor]:
    """Of each matrix that reads them, which columns went, by those that are left as they were."""
    found = {}
    for key in whole:
        if is_reader(key, structure):
            before, after = columns_of(key, whole[key]), columns_of(key, narrow[key])
            same = (before[:, None] == after[None]).all(-1)
            assert (same.sum(0) == 1).all()
            assert len(after) == len(before) // 2
            found[key] = ~same.any(1)
    assert found
    return found


def test_units_that_a_norm_takes_together_are_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """What is left of them would be divided by the mean of fewer."""
    plan = Plan.make(recipe_of(tiny("olmo2"), tmp_path / "out", _prune(structure="heads")))
    assert any("norms groups of attention heads together" in str(problem) for problem in plan.problems)


@pytest.mark.few(3)
@pytest.mark.parametrize("structure", ["ffn", "heads"])
@pytest.mark.parametrize("architecture", list(CONFIGS))
@torch.no_grad()
def test_what_is_left_computes_what_the_rest_did(
    architecture: str, structure: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    if structure == "heads" and architecture in NO_HEADS:
        pytest.skip("its heads cannot go, or what is left computes otherwise")
    model = tiny(architecture)
    checkpoint = run(recipe_of(model, tmp_path / "out", _prune(structure=structure))).checkpoint
    whole, narrow = _tensors(model), _tensors(checkpoint)
    for key, gone in _gone(whole, narrow, structure).items():
        columns_of(key, whole[key])[gone] = 0
    masked = tmp_path / "masked"
    shutil.copytree(model, masked, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(whole, masked / "model.safetensors", {"format": "pt"})
    found, wanted = (
        AutoModelForCausalLM.from_pretrained(each).eval()(TOKENS, use_cache=False).logits
        for each in (checkpoint, masked)
    )
    assert (found - wanted).norm() / wanted.norm() < 1e-4


@pytest.mark.parametrize(("structure", "reader", "width"), [("ffn", "mlp.down_proj", 1), ("heads", "o_proj", 64)])
@torch.no_grad()
def test_what_has_the_largest_norms_stays(
    structure: str, reader: str, width: int, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = recipe_of(tiny(), tmp_path / "out", _prune(structure=structure))
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    checkpoint = run(recipe).checkpoint
    whole = AutoModelForCausalLM.from_pretrained(recipe.model).eval()
    seen: list[Tensor] = []
    first = next(module for name, module in whole.named_modules() if name.endswith(reader))
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    whole(plan.calibration.tokens, use_cache=False)
    norms = seen[0].flatten(0, 1).double().square().sum(0).view(-1, width).sum(-1)
    gone = next(iter(_gone(_tensors(Path(recipe.model)), _tensors(checkpoint), structure).values()))
    assert set((~gone).view(-1, width)[:, 0].nonzero().flatten().tolist()) == set(
        norms.topk(len(norms) // 2).indices.tolist()
    )


@pytest.mark.parametrize(("structure", "reader", "width"), [("ffn", "mlp.down_proj", 1), ("heads", "o_proj", 64)])
def test_taylor_is_the_gradient_of_the_loss_times_what_is_read(
    structure: str, reader: str, width: int, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = recipe_of(tiny(), tmp_path / "out", _prune(structure=structure, score="taylor"))
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    checkpoint = run(recipe).checkpoint
    whole = AutoModelForCausalLM.from_pretrained(recipe.model).eval()
    seen: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        seen.append(inputs[0])

    for name, module in whole.named_modules():
        if name.endswith(reader):
            module.register_forward_pre_hook(keep)
    whole(plan.calibration.tokens, labels=plan.calibration.tokens, use_cache=False).loss.backward()
    gone = _gone(_tensors(Path(recipe.model)), _tensors(checkpoint), structure).values()
    for each, read in zip(gone, seen, strict=True):
        assert read.grad is not None
        moved = (read * read.grad).detach().double().flatten(0, 1).unflatten(-1, (-1, width)).sum(-1).abs().sum(0)
        wanted = set(moved.topk(len(moved) // 2).indices.tolist())
        found = set((~each).view(-1, width)[:, 0].nonzero().flatten().tolist())
        assert len(found - wanted) <= 2  # of equals, one or the other


@pytest.mark.few(1)
@pytest.mark.parametrize("score", ["wanda", "weight", "path"])
def test_every_score_leaves_a_model(score: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    steps = [_prune(score=score), _heads(score=score, update="least_squares")]
    checkpoint = run(recipe_of(tiny("phi3"), tmp_path / "out", *steps)).checkpoint
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["intermediate_size"], config["num_key_value_heads"], config["num_attention_heads"]) == (128, 1, 2)
    AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.few(1)
@pytest.mark.parametrize("structure", ["ffn", "heads"])
@torch.no_grad()
def test_least_squares_loses_less(structure: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny()
    errors = []
    for number, update in enumerate((None, "least_squares")):
        result = run(recipe_of(model, tmp_path / str(number), _prune(structure=structure, update=update)))
        layers = json.loads((result.checkpoint / "smelt.json").read_text())["steps"][0]["layers"]
        assert len(layers) == 3
        errors.append(layers[0]["error"])
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("step", [_prune(), {"prune": {"structure": "2:4"}}])
def test_a_guard_reports_layers_or_ends_the_run(
    step: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny()
    guarded = {"prune": {**step["prune"], "guard": {"max_layer_error": 0.01}}}
    checkpoint = run(recipe_of(model, tmp_path / "warned", guarded)).checkpoint
    layers = json.loads((checkpoint / "smelt.json").read_text())["steps"][0]["layers"]
    assert all("more than max_layer_error 0.01" in layer["notes"][-1] for layer in layers)
    failing = {"prune": {**step["prune"], "guard": {"max_layer_error": 0.01, "otherwise": "fail"}}}
    with pytest.raises(SmeltError, match="remove less"):
        run(recipe_of(model, tmp_path / "failed", failing))
    assert not (tmp_path / "failed" / "checkpoint").exists()
    with pytest.raises(ValueError, match="use warn or fail"):
        recipe_of(
            model, tmp_path, {"prune": {**step["prune"], "guard": {"max_layer_error": 1, "otherwise": "fallback"}}}
        )


def test_then_quantized_and_served(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", num_hidden_layers=2)
    steps = [
        _prune(update="least_squares"),
        _heads(),
        {"quantize": {"scheme": "W8A16", "group_size": 64, "rounding": "gptq"}},
    ]
    result = run(recipe_of(model, tmp_path / "out", *steps))
    assert json.loads((result.checkpoint / "config.json").read_text())["intermediate_size"] == 128
    prompt = TOKENS[0, :12].tolist()
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    served = Engine(result.checkpoint).generate([prompt], sampling)[0]
    theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 12:]
    assert served.outputs[0].token_ids == expected.tolist()


def test_a_layout_that_is_not_as_thought_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("phi3")  # gate and up are one matrix, one after the other

    def side_by_side(span: Span, _: int, kept: Tensor) -> Tensor:
        size = sum(span.parts)
        return (kept[:, None] * size + torch.arange(size)).flatten()

    monkeypatch.setattr(Span, "places", side_by_side)
    with pytest.raises(SmeltError, match="in a way that Smelt does not follow"):
        run(recipe_of(model, tmp_path / "out", _prune()))
    assert not (tmp_path / "out" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("architecture", "steps", "said"),
    [
        ("llama", [_prune(ratio=0.99)], "steps.0.prune.ratio: leaves none of 256"),
        ("llama", [_prune(ratio=0.01)], "steps.0.prune.ratio: removes none of 256"),
        ("gpt2", [_heads()], "steps.0.prune.structure: GPT2LMHeadModel: no linear's inputs change with n_head"),
        ("opt", [_heads()], "steps.0.prune.structure: OPTForCausalLM"),
        ("llama", [_heads(ratio=None, count=1)], "steps.0.prune.count: 1 heads are not whole groups: 2 query heads"),
        ("llama", [_heads(ratio=None, count=4)], "steps.0.prune.count: leaves none of 2 groups"),
        ("llama", [_heads(ratio=0.1)], "steps.0.prune.ratio: removes none of 2 groups"),
        (
            "llama",
            [_prune(ratio=0.25), {"quantize": {"scheme": "W4A16", "group_size": 128}}],
            "steps.1.quantize.group_size: model.layers.0.mlp.down_proj",
        ),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    architecture: str, steps: list[dict[str, Any]], said: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan = Plan.make(recipe_of(tiny(architecture), tmp_path / "out", *steps))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]
    assert not (tmp_path / "out").exists()
