"""Every scheme and rounding method end to end, the recipe check, and what `smelt inspect` makes of the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from smelt.compress import Recipe, SmeltError, inspect, run, verify
from smelt.compress.pipeline.plan import Plan
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import OWN_ROUNDING, SUPPORTED
from transformers import AutoModelForCausalLM

from ...tiny import SMELT_6M, from_transformers

FP4 = ("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4")
PAIRS = [
    pytest.param(
        scheme, dtype, marks=[pytest.mark.slow] if dtype == torch.float32 and scheme not in ("W4A16", "W8A8") else []
    )
    for scheme in SUPPORTED
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if dtype == torch.bfloat16 or scheme not in FP4
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", FP4)
def test_fp4_of_a_model_that_would_not_compute_is_refused(
    scheme: str, dtype: torch.dtype, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(SmeltError, match="convert the model to bfloat16 first"):
        run(recipe(tiny("llama", dtype), scheme=scheme))


@pytest.mark.few(2)
@pytest.mark.parametrize(("scheme", "dtype"), PAIRS)
def test_checkpoint_loads_in_transformers_and_is_close(
    scheme: str, dtype: torch.dtype, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = tiny("llama", dtype)
    rounding = OWN_ROUNDING.get(scheme, "gptq")
    result = run(recipe(path, scheme=scheme, rounding=rounding))
    config = json.loads((result.checkpoint / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate({k: v for k, v in config.items() if k not in ("version",)})
    assert parsed.config_groups["group_0"].weights.model_dump() == resolve(scheme).args.model_dump()
    assert "lm_head" in config["ignore"]
    tokens = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(path)(tokens).logits.float()
        after = from_transformers(result.checkpoint)(tokens).logits.float()
    if scheme in (
        "W8A16",
        "W4IN8",
        "W8A8",
    ):  # a coarser grid moves a random model far; trained ones are measured elsewhere
        assert (after - before).norm() / before.norm() < 0.15
    found = inspect(str(result.checkpoint))
    assert found.bytes == result.report.candidates[0].size.bytes
    assert (
        found.bytes
        == Plan.make(recipe(path, scheme=scheme, rounding=rounding)).as_data()["steps"][0]["checkpoint_bytes"]
    )
    quantized = [g for g in found.groups if "mlp.up_proj" in g.name]
    assert quantized[0].numel == 3 * 256 * 128
    assert quantized[0].bits == pytest.approx(8 * resolve(scheme).stored_bytes(256, 128, dtype.itemsize) / (256 * 128))


@pytest.mark.parametrize(
    ("architecture", "scheme", "says"),
    [("mixtral", "W8A8", True), ("mixtral", "W8A16", False), ("llama", "W8A8", False)],
)
def test_what_transformers_does_not_round_is_said(
    architecture: str, scheme: str, says: bool, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    """Its logits are those of the check, but not those that servers compute."""
    made = recipe(
        tiny(architecture, torch.bfloat16), {"evaluate": False}, scheme=scheme, rounding="nearest", group_size=None
    )
    sentence = (run(made).report.candidates[0].reload or {})["sentence"]
    assert ("does not round experts' inputs" in sentence) == says


@pytest.mark.few(1)
@pytest.mark.parametrize("rounding", ["nearest", "hqq", {"method": "gptq", "activation_order": False, "damping": 0.05}])
def test_every_rounding_gives_a_checkpoint(rounding: object, recipe: Callable[..., Recipe]) -> None:
    result = run(recipe("builtin:smelt-6m", {"evaluate": False}, group_size=64, rounding=rounding))
    assert all(layer.error and 0 < layer.error < 0.3 for layer in result.report.candidates[0].layers)


def test_an_untied_head_can_be_quantized(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    path = tiny("llama", torch.bfloat16)
    result = run(recipe(path, scheme="W8A16", group_size=32, rounding="gptq", ignore=[]))
    layers = {layer.name: layer.error for layer in result.report.candidates[0].layers}
    assert layers["lm_head"] < 0.05
    head = AutoModelForCausalLM.from_pretrained(result.checkpoint).lm_head
    assert hasattr(head, "quantization_scheme")


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_a_head_whose_inputs_are_rounded(scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    result = run(recipe(tiny("llama", torch.bfloat16), scheme=scheme, ignore=[]))
    assert (result.report.candidates[0].reload or {})["through"] == "transformers"
    # Both models share one skeleton while they are compared; the original must not see the quantized head.
    before, after = run(recipe("builtin:smelt-6m", group_size=64), fresh=True).report.models
    assert before.text is not None
    assert after.text is not None
    assert before.text.perplexity != after.text.perplexity


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_inputs_that_a_model_flattens_are_rounded_token_by_token(
    scheme: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    """compressed-tensors takes one scale for all tokens of OPT's feed-forward parts, which are no fault of the checkpoint."""
    result = run(recipe(tiny("opt"), scheme=scheme))
    assert (result.report.candidates[0].reload or {})["through"] == "transformers"
    found = verify(result.checkpoint, output=None, progress=False)
    assert {each.claim: each.verdict for each in found}["the logits"] == "confirmed"


def test_a_mixture_that_returns_its_routers_logits_is_quantized(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    """As those that were trained with a load-balancing loss do."""
    path = tiny("mixtral", torch.bfloat16, output_router_logits=True)
    result = run(recipe(path, group_size=32, ignore=["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate"]))
    assert json.loads((result.checkpoint / "config.json").read_text())["output_router_logits"] is True


@pytest.mark.parametrize("ignore", ["re:.*w2", "re:.*experts.*", "re:.*experts.0.*"])
def test_experts_that_are_left_out_are_found_before_any_work(
    ignore: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(SmeltError, match="only if all of its experts are quantized"):
        run(recipe(tiny("mixtral", torch.bfloat16), group_size=32, ignore=["lm_head", ignore]))


def test_targets_and_ignore_choose_what_is_quantized(tiny: Callable[..., Path], recipe: Callable[..., Recipe]) -> None:
    result = run(
        recipe(
            tiny("llama", torch.bfloat16), group_size=32, targets=["re:.*mlp.*"], ignore=["model.layers.1.mlp.up_proj"]
        )
    )
    names = {layer.name for layer in result.report.candidates[0].layers}
    assert names == {f"model.layers.{i}.mlp.{n}_proj" for i in range(3) for n in ("gate", "up", "down")} - {
        "model.layers.1.mlp.up_proj"
    }
    loaded = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    assert not hasattr(loaded.model.layers[0].self_attn.q_proj, "quantization_scheme")


@pytest.mark.parametrize(
    ("quantize", "expected"),
    [
        ({"group_size": 100}, "are not divisible by group_size 100"),
        ({"targets": ["self_attn.qproj"]}, "matches no linear of the model"),
        ({"targets": ["model.layers.0.self_attn.qproj"]}, "did you mean model.layers.0.self_attn.q_proj"),
        ({"ignore": ["lm_haed"]}, "'lm_haed' matches no linear"),
        ({"ignore": ["model.layers.0.self_attn"]}, "'model.layers.0.self_attn' matches no linear"),
        ({"ignore": ["re:.*mlp$"]}, "'re:.*mlp$' matches no linear"),
        ({"ignore": ["Linear"]}, "nothing would be quantized"),
    ],
)
def test_what_would_fail_later_fails_in_the_check(
    quantize: dict[str, object], expected: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    plan = Plan.make(recipe(tiny(), **{"group_size": 32, **quantize}))
    assert any(expected in str(problem) for problem in plan.problems), plan.problems
    assert not (tmp_path / "out").exists()


def test_stories260k_divides_by_no_group_and_the_error_says_so(shared: Path, recipe: Callable[..., Recipe]) -> None:
    plan = Plan.make(recipe(shared / "models/stories260K", group_size=64))
    assert any(
        "172 input columns are not divisible by group_size 64; use group_size: -1" in str(p) for p in plan.problems
    )


def test_too_little_memory_or_disk_is_found_before_any_work(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from smelt.compress.pipeline import plan as plan_module

    monkeypatch.setattr(plan_module, "available_memory", lambda: 1_000_000)
    monkeypatch.setattr(plan_module, "free_disk", lambda _: 1_000)
    found = [str(p) for p in Plan.make(recipe("builtin:smelt-6m", group_size=64)).problems]
    assert any(p.startswith("memory: the run needs about") for p in found)
    assert any(p.startswith("output: the run writes about") for p in found)
    assert not (tmp_path / "out").exists()


def test_inspect_sees_a_plain_model() -> None:
    found = inspect("builtin:smelt-6m")
    assert found.bytes == found.original_bytes
    assert sum(group.numel for group in found.groups) == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(SMELT_6M).parameters()
    )


def test_large_checkpoints_are_sharded(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    from smelt.compress.steps import quantized_checkpoint as step

    original = step.write_checkpoint
    monkeypatch.setattr(step, "write_checkpoint", lambda *a, **k: original(*a, **k, shard_bytes=300_000))
    result = run(recipe(tiny("llama", torch.bfloat16), {"evaluate": False}, group_size=32))
    shards = sorted(p.name for p in result.checkpoint.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert (result.report.candidates[0].reload or {})["through"] == "transformers"
