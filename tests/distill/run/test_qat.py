"""Quantization-aware training: what is saved computes what was trained, here and in transformers, and it is better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.evaluation.scoring.runtime_reader import RuntimeReader
from smelt.compress.pipeline.plan import Plan
from smelt.compress.reporting.report_files import load
from smelt.compress.steps import train_quantized
from smelt.distill.run.student import WholeModel
from smelt.runtime import EngineConfig
from smelt.system.progress import Progress
from torch import Tensor
from transformers import CompressedTensorsConfig

from ...tiny import from_transformers

TRAINING = {"tokens": 10 * 4 * 32, "length": 32, "batch": 4, "learning_rate": 1e-3}
TOKENS = torch.randint(2, 4096, (12, 12), generator=torch.Generator().manual_seed(7))
Make = Callable[..., Recipe]


@pytest.fixture
def trained(tmp_path: Path) -> Make:
    """``trained(model, {"lora": 4}, scheme=…)``: a small recipe with a quantize step that trains."""

    def build(model: Path | str, train: dict[str, Any] | None = None, **quantize: Any) -> Recipe:
        return Recipe.model_validate(
            {
                "model": str(model),
                "output": str(tmp_path / "out"),
                "calibrate": {"samples": 4, "length": 32},
                "evaluate": False,
                "steps": [{"quantize": {**quantize, "train": {**TRAINING, **(train or {})}}}],
            }
        )

    return build


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What students compute when their training has ended, one tensor for each training."""
    found: list[Tensor] = []
    train = train_quantized.train

    def watched(settings: Any, student: WholeModel, *rest: Any) -> Any:
        outcome = train(settings, student, *rest)
        with torch.no_grad():
            hidden, head = student.split.hidden(TOKENS), student.split.head
            found.append(student.split.logits(hidden, head.weight, head.bias).float())
        return outcome

    monkeypatch.setattr(train_quantized, "train", watched)
    return found


CASES: list[Any] = [
    pytest.param("llama", {"scheme": "W4A16", "group_size": 32, "rounding": "gptq"}, {}, marks=pytest.mark.slow),
    ("llama", {"scheme": "W2A16", "group_size": 32, "transforms": ["rotate"], "ignore": []}, {"average": 0.8}),
    ("llama", {"scheme": "W4A16_ASYM", "group_size": 32, "transforms": ["awq"]}, {}),
    ("llama", {"scheme": "W8A8", "kv_cache": "int8"}, {"scales": 0}),
    ("llama", {"scheme": "W4A8", "inputs": None, "kv_cache": "int4"}, {"checkpointing": True}),
    ("llama", {"scheme": "W3A16", "group_size": 32, "embeddings": "int8", "ignore": []}, {"lora": 4}),
    pytest.param("opt", {"scheme": "W4A16", "group_size": 32}, {"lora": 4}, marks=pytest.mark.slow),
    pytest.param("qwen2", {"scheme": "FP8_DYNAMIC"}, {}, marks=pytest.mark.slow),
    ("mixtral", {"scheme": "W4A16", "group_size": 32}, {}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("architecture", "quantize", "train"), CASES, ids=lambda x: x if isinstance(x, str) else None)
def test_what_is_saved_computes_what_was_trained(
    architecture: str,
    quantize: dict[str, Any],
    train: dict[str, Any],
    trained: Make,
    tiny: Callable[..., Path],
    logits: list[Tensor],
    tmp_path: Path,
) -> None:
    result = run(trained(tiny(architecture), train, **quantize), progress=False)
    (wanted,) = logits
    # An input or a key that lies between two codes may become either, as the processor adds up, and all that follows differs.
    least = 0.99 if quantize["scheme"].endswith(("A16", "ASYM")) and "kv_cache" not in quantize else 0.3
    ours = RuntimeReader(result.checkpoint, tmp_path, EngineConfig())
    store = ours.final_hidden(TOKENS, Progress(False), "")
    served = ours.head()(store.read(slice(None)))
    _assert_agree(served.view_as(wanted), wanted, least)
    if "kv_cache" not in quantize:  # transformers does not round its cache
        with torch.no_grad():
            theirs = from_transformers(result.checkpoint)(input_ids=TOKENS).logits
        _assert_agree(theirs, wanted, least)


def _assert_agree(found: Tensor, wanted: Tensor, least: float) -> None:
    """Of that share of positions logits are the same to float rounding, and nowhere are they far apart."""
    apart = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float((apart < 1e-3).float().mean()) > least
    assert float(apart.max()) < 0.05


@pytest.mark.slow
def test_training_beats_the_rounding_that_it_began_with(trained: Make) -> None:
    settings = {"tokens": 24 * 8 * 64, "length": 64, "batch": 8, "learning_rate": 3e-4}
    recipe = trained("builtin:smelt-6m", settings, scheme="W2A16", group_size=64, rounding="gptq")
    plain = recipe.model_dump(mode="json")
    plain["steps"][0]["quantize"]["train"] = None
    plain["output"] += "-plain"
    evaluate = {"windows": 16, "length": 128, "samples": 0, "speed": False}
    kl = [
        run(Recipe.model_validate({**each, "evaluate": evaluate}), progress=False).report.candidates[0].against
        for each in (recipe.model_dump(mode="json"), plain)
    ]
    assert kl[0] is not None
    assert kl[1] is not None
    assert (kl[0].kl or 1) < 0.95 * (kl[1].kl or 0)


@pytest.mark.slow
def test_lora_trains_the_products_and_nothing_else(trained: Make, tiny: Callable[..., Path]) -> None:
    path = tiny()
    recipe = trained(path, {"lora": 4}, scheme="W4A16", group_size=32)
    (lora,), (whole,) = (Plan.make(each).prepared for each in (recipe, trained(path, scheme="W4A16", group_size=32)))
    # Their masters, gradients and moments are all that is kept beside the model; activations are the same.
    assert lora.cost(4, 32).disk < whole.cost(4, 32).disk
    result = run(recipe, progress=False)
    found, before = load_file(result.checkpoint / "model.safetensors"), load_file(path / "model.safetensors")
    same = [name for name in found if name in before]
    assert "model.embed_tokens.weight" in same
    assert all(torch.equal(found[name], before[name]) for name in same)
    plain = trained(path, {"learning_rate": 1e-30}, scheme="W4A16", group_size=32)
    plain = plain.model_copy(update={"output": recipe.output + "-plain"})
    kept = load_file(run(plain, progress=False).checkpoint / "model.safetensors")
    assert any(not torch.equal(found[name], kept[name]) for name in found if name.endswith("weight_packed"))


@pytest.mark.parametrize("lora", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_upper_bits_learn_to_draft_and_all_bits_stay_near_the_original(
    lora: int | None, trained: Make, tiny: Callable[..., Path], logits: list[Tensor], tmp_path: Path
) -> None:
    path, give = tiny("qwen2"), 0.25  # which has biases
    quantize = {
        "scheme": "W4in8", "group_size": 32, "rounding": {"method": "nested", "give": give}, "ignore": [],
        "overrides": [{"targets": ["re:.*o_proj"], "rounding": "nearest"}],
    }  # fmt: skip
    result = run(trained(path, {"lora": lora, "learning_rate": 3e-3}, **quantize), progress=False)
    plain = trained(path, **quantize).model_dump(mode="json")
    plain["steps"][0]["quantize"]["train"] = None
    untrained = run(Recipe.model_validate({**plain, "output": str(tmp_path / "plain")}), progress=False)
    found, before, original = (
        load_file(each / "model.safetensors") for each in (result.checkpoint, untrained.checkpoint, path)
    )
    learned = {name for name in found if not torch.equal(found[name], before[name])}
    rounded = {name for name in found if name.endswith("weight_packed")}
    assert learned == {name for name in rounded if "o_proj" not in name}
    # All bits are near the original, and training computed with the upper ones alone, as a drafter will.
    model = from_transformers(path)
    for name in rounded:
        linear = name.removesuffix(".weight_packed")
        scale = found[f"{linear}.weight_scale"].float().repeat_interleave(32, 1)
        codes = unpack_from_int32(found[name], 8, torch.Size(scale.shape))
        key = f"{linear}.weight" if f"{linear}.weight" in original else "model.embed_tokens.weight"  # a tied head
        exact = (original[key].float() / scale).clamp(-128, 127)
        assert ((codes - exact).abs() <= give * 16 + 1.01).all(), name
        upper = ((codes.int() >> 4) * 16 + 8) * scale
        model.get_submodule(linear).weight = torch.nn.Parameter(upper, requires_grad=False)
    with torch.no_grad():
        _assert_agree(model(input_ids=TOKENS).logits, logits[0], 0.99)
    assert any("upper four of 8 bits" in note for note in result.report.models[-1].warnings)


@pytest.mark.parametrize(("scheme", "rounding"), [("W4A16", "gptq"), ("W4in8", "nested")])
def test_pruned_and_quantized_together_keeps_the_zeros(
    trained: Make, tiny: Callable[..., Path], scheme: str, rounding: str
) -> None:
    recipe = trained(tiny(), scheme=scheme, group_size=32, rounding=rounding).model_dump(mode="json")
    recipe["steps"].insert(0, {"prune": {"structure": "2:4"}})
    result = run(Recipe.model_validate(recipe), progress=False)
    model = from_transformers(result.checkpoint, quantization_config=CompressedTensorsConfig(dequantize=True))
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            assert (((module.weight.float().view(-1, 4)) != 0).sum(1) <= 2).all(), name


@pytest.mark.slow
def test_an_interrupted_training_ends_with_the_same_codes(
    trained: Make, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny()
    recipe = trained(path, scheme="W4A16", group_size=32)
    quiet = recipe.model_copy(update={"output": str(tmp_path / "quiet")})
    run(quiet, progress=False)
    track, count = Progress.track, [0]

    def stopped(progress: Progress, items: Any, *rest: Any) -> Any:
        for item in track(progress, items, *rest):
            count[0] += isinstance(items, range) and len(items) == 10
            if count[0] == 5:
                raise KeyboardInterrupt
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "track", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, progress=False)
    assert (tmp_path / "out/journal/step-0/snapshot.json").exists()
    result = run(recipe, progress=False)
    one, other = (load_file(each / "model.safetensors") for each in (result.checkpoint, tmp_path / "quiet/checkpoint"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_what_cannot_be_trained_is_reported_before_any_work(trained: Make, tiny: Callable[..., Path]) -> None:
    for recipe, said in (
        (
            trained(tiny(), {"data": "nowhere.txt"}, scheme="W8A16"),
            "train.data: nowhere.txt: text file not found",
        ),
        (trained(tiny(), {"length": 512, "tokens": 4096}, scheme="W8A16"), "train.length: 512 tokens exceed"),
    ):
        assert said in "\n".join(str(problem) for problem in Plan.make(recipe).problems)
        with pytest.raises(SmeltError):
            run(recipe, progress=False)
        assert not Path(recipe.output).exists()


@pytest.mark.slow
def test_the_first_steps_do_not_undo_what_gptq_chose(trained: Make, tmp_path: Path) -> None:
    """Its codes are seldom the nearest: weights must not start where any step brings them back."""
    recipe = trained(
        "builtin:smelt-6m",
        {"tokens": 4 * 8 * 128, "length": 128, "batch": 8, "learning_rate": 1e-4},
        scheme="W4A16",
        group_size=64,
        rounding="gptq",
    )
    calibrate = recipe.calibrate.model_copy(update={"samples": 64, "length": 128})
    run(recipe.model_copy(update={"calibrate": calibrate}), progress=False)
    curve = load(tmp_path / "out" / "report.json").models[-1].training[0].curve
    held_out = [point.held_out["teacher"] for point in curve if point.held_out]
    assert len(held_out) > 2
    assert max(held_out[1:]) < 1.5 * held_out[0]
