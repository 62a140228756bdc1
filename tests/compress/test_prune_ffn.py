"""Taking feed-forward channels away: the smaller model against transformers' own with those channels unread."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.errors import SmeltError
from smelt.compress.plan import Plan
from smelt.compress.steps import prune_ffn
from smelt.runtime import Engine, SamplingParams
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ..tiny import CONFIGS

TOKENS = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
READERS = ("mlp.down_proj", "mlp.dense_4h_to_h", "mlp.c_proj", "fc2")
WRITERS = ("mlp.up_proj", "mlp.gate_up_proj", "mlp.dense_h_to_4h", "mlp.c_fc", "fc1")
MIXTURES = ("mixtral", "qwen3_moe")


def _recipe(model: Path, output: Path, *steps: dict[str, Any], **top: Any) -> Recipe:
    data = {
        "model": str(model),
        "output": str(output),
        "calibrate": {"samples": 8, "length": 64},
        "evaluate": False,
        "steps": list(steps),
    }
    return Recipe.model_validate(data | top)


def _prune(**settings: Any) -> dict[str, Any]:
    return {"prune": {"structure": "ffn", "ratio": 0.5, **settings}}


def _rows(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def _named(model: nn.Module, endings: tuple[str, ...]) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(endings)]


def _kept(whole: nn.Module, narrow: nn.Module) -> list[Tensor]:
    """Which channels stayed in each block, told by the rows that write them."""
    found = []
    for before, after in zip(_named(whole, WRITERS), _named(narrow, WRITERS), strict=True):
        width = _named(narrow, READERS)[0]
        rows = _rows(after)[-_rows(width).shape[1] :]  # of gate and up in one matrix, up
        all_rows = _rows(before)[-_rows(_named(whole, READERS)[0]).shape[1] :]
        found.append((rows[:, None] == all_rows[None]).all(-1).int().argmax(1))
    return found


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name not in MIXTURES])
@torch.no_grad()
def test_what_is_left_computes_what_the_rest_did(architecture: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny(architecture)
    checkpoint = run(_recipe(model, tmp_path / "out", _prune())).checkpoint
    whole, narrow = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model, checkpoint))
    for reader, before, kept in zip(_named(narrow, READERS), _named(whole, READERS), _kept(whole, narrow), strict=True):
        width = _rows(before).shape[1]
        assert _rows(reader).shape[1] == width // 2
        assert len(kept.unique()) == width // 2
        gone = torch.ones(width, dtype=torch.bool)
        gone[kept] = False
        _rows(before)[:, gone] = 0
    found, wanted = (each(TOKENS, use_cache=False).logits for each in (narrow, whole))
    assert (found - wanted).norm() / wanted.norm() < 1e-4


@torch.no_grad()
def test_the_channels_with_the_largest_norms_stay(tiny: Callable[..., Path], tmp_path: Path) -> None:
    recipe = _recipe(tiny(), tmp_path / "out", _prune(ratio=0.75))
    plan = Plan.make(recipe)
    assert plan.calibration is not None
    checkpoint = run(recipe).checkpoint
    whole, narrow = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (recipe.model, checkpoint))
    seen: list[Tensor] = []
    _named(whole, READERS)[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    whole(plan.calibration.tokens, use_cache=False)
    norms = seen[0].flatten(0, 1).double().norm(dim=0)
    assert set(_kept(whole, narrow)[0].tolist()) == set(norms.topk(64).indices.tolist())


@torch.no_grad()
def test_least_squares_loses_less(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny()
    errors = []
    for number, update in enumerate((None, "least_squares")):
        result = run(_recipe(model, tmp_path / str(number), _prune(update=update)))
        layers = json.loads((result.checkpoint / "smelt.json").read_text())["steps"][0]["layers"]
        assert len(layers) == 3
        errors.append(layers[0]["error"])
    assert errors[1] < 0.9 * errors[0]


def test_then_quantized_and_served(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", num_hidden_layers=2)
    steps = [_prune(update="least_squares"), {"quantize": {"scheme": "W8A16", "rounding": "gptq"}}]
    result = run(_recipe(model, tmp_path / "out", *steps))
    assert json.loads((result.checkpoint / "config.json").read_text())["intermediate_size"] == 128
    prompt = TOKENS[0, :12].tolist()
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    served = Engine(result.checkpoint).generate([prompt], sampling)[0]
    theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, 12:]
    assert served.completions[0].tokens == expected.tolist()


def test_interrupted_after_a_block_it_goes_on(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.bfloat16)
    quiet = run(_recipe(model, tmp_path / "quiet", _prune(update="least_squares")))
    save, saved = prune_ffn.save_part, []

    def stop(*args: Any) -> None:
        save(*args)
        saved.append(args[0].name)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(prune_ffn, "save_part", stop)
    recipe = _recipe(model, tmp_path / "out", _prune(update="least_squares"))
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    resumed = run(recipe)
    assert saved == [f"block-0000{i}.safetensors" for i in range(3)]
    name = "model.safetensors"
    assert (resumed.checkpoint / name).read_bytes() == (quiet.checkpoint / name).read_bytes()


def test_a_layout_that_is_not_as_thought_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("phi3")  # gate and up are one matrix, one after the other
    side_by_side = "smelt.compress.narrower._places"
    monkeypatch.setattr(side_by_side, lambda stays, _, times: torch.cat([stays * times + i for i in range(times)]))
    with pytest.raises(SmeltError, match="in a way that Smelt does not follow"):
        run(_recipe(model, tmp_path / "out", _prune()))
    assert not (tmp_path / "out" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("architecture", "steps", "said"),
    [
        ("llama", [_prune(ratio=0.99)], "steps.0.prune.ratio: leaves none of 256"),
        ("llama", [_prune(ratio=0.01)], "steps.0.prune.ratio: takes none of 256"),
        ("mixtral", [_prune()], "steps.0.prune.structure: MixtralForCausalLM"),
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
    plan = Plan.make(_recipe(tiny(architecture), tmp_path / "out", *steps))
    assert [problem for problem in plan.problems if str(problem).startswith(said)], [str(p) for p in plan.problems]
    assert not (tmp_path / "out").exists()
