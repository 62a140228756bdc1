"""Plans, against arithmetic, and against sizes and cost models that do not know of plans."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.models.directory.directory import ModelDirectory
from smelt.quant.cache_types import BY_NAME
from smelt.quant.scheme import resolve
from smelt.runtime import RuntimeProblem
from smelt.runtime.costs.model_size import model_size
from smelt.runtime.costs.roofline import RooflineCost
from smelt.runtime.costs.work import StepWork
from smelt.runtime.devices.device import load_device
from smelt.runtime.plan import measured
from smelt.runtime.plan.candidates import find_candidates, without_blocks
from smelt.runtime.plan.losses import CACHE_LOSS, SCHEME_LOSS, UNQUANTIZED, block_loss
from smelt.runtime.plan.planner import PlanEntry, PlanRequest, ServingPlan, plan
from smelt.runtime.plan.targets import PlanTarget, parse_targets
from smelt.runtime.plan.text import plan_table
from transformers import AutoConfig

from tests.house import REPOSITORY

WIDTHS = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
GIB = 2**30


def _llama(folder: Path, layers: int = 32) -> ModelDirectory:
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, **WIDTHS)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    return ModelDirectory("llama", folder)


def _by_label(found: ServingPlan) -> dict[str, PlanEntry]:
    return {each.candidate.label: each for each in found.planned}


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return _llama(tmp_path_factory.mktemp("8b"))


@pytest.fixture(scope="module")
def on_h100(llama_8b: ModelDirectory) -> ServingPlan:
    schemes = ("unquantized", "W4A16", "FP8_DYNAMIC", "NVFP4")
    return plan(llama_8b, PlanRequest("h100-sxm", context=8192, schemes=schemes))


def test_llama_3_8b_on_an_h100_by_hand(on_h100: ServingPlan) -> None:
    """16.06 GB of weights and 128 KiB a position: 53 sequences of 8,192 in 85% of 80 GiB."""
    plain = _by_label(on_h100)["bfloat16"].figures
    assert plain.weight_bytes / 1e9 == pytest.approx(16.06, rel=0.001)
    assert plain.cache_bytes == GIB
    assert plain.sequences == int((0.85 * 80 * GIB - plain.weight_bytes) / GIB) == 53
    assert plain.memory_bytes == pytest.approx((plain.weight_bytes + GIB) / 0.85)
    # Every token reads all weights but the embedding, and the cache.
    read = plain.weight_bytes - 2 * 128256 * 4096 + GIB
    assert plain.tokens_per_second <= 3.35e12 / read
    assert plain.joules == pytest.approx(700 * 8 / (plain.throughput or 0) / 8)
    assert on_h100.recommended is _by_label(on_h100)["bfloat16"]


def test_times_are_those_of_the_cost_model(on_h100: ServingPlan, llama_8b: ModelDirectory) -> None:
    size = model_size(llama_8b, scheme=resolve("W4A16", 128), kv_cache_dtype="int8")
    cost = RooflineCost(size, load_device("h100-sxm"))
    found = _by_label(on_h100)["W4A16 g128, int8 cache"].figures
    assert found.weight_bytes == size.weight_bytes
    assert 1 / found.tokens_per_second == pytest.approx(cost.seconds(StepWork(1, 1, 8192, 8192, chunks=1)))
    whole = 8192 * 8193 // 2
    assert found.first_token_in_one_step == pytest.approx(cost.seconds(StepWork(8192, 1, 8192, whole, 0, 1, 1, whole)))
    assert found.first_token >= found.first_token_in_one_step


def test_what_a_device_lacks_is_said(on_h100: ServingPlan) -> None:
    """An H100 has products in fp8 and none in fp4; on a CPU both are dequantized, and 2 bits are kept in 4."""
    labels = _by_label(on_h100)
    assert labels["FP8_DYNAMIC"].candidate.notes == ()
    assert "no fp4 products" in labels["NVFP4"].candidate.notes[0]


def test_a_cpu_keeps_what_its_kernels_keep(tmp_path: Path) -> None:
    directory = _llama(tmp_path, layers=2)
    found = {each.label: each for each in find_candidates(directory, on_cpu=True, constants=())}
    assert found["FP8_DYNAMIC"].size.weight_bytes == found["bfloat16"].size.weight_bytes
    assert found["W2A16 g128"].size.weight_bytes == found["W4A16 g128"].size.weight_bytes
    assert {each.kv_cache_dtype for each in found.values()} == {"auto", "int8", "fp8"}


def test_what_gains_nothing_is_not_recommended(tmp_path: Path) -> None:
    directory = _llama(tmp_path / "model", layers=2)
    device = tmp_path / "small.yaml"
    device.write_text("{name: s, kind: cpu, constants: {memory_bytes: 8e9, bandwidth: 3e10, flops_bf16: 1e12}}")
    found = _by_label(plan(directory, PlanRequest(str(device), schemes=("unquantized", "FP8_DYNAMIC", "W4A16"))))
    assert found["FP8_DYNAMIC"].no_gain_over == "bfloat16"
    assert found["W4A16 g128"].no_gain_over is None


def test_removed_blocks_take_their_share(tmp_path: Path) -> None:
    whole, short = (model_size(_llama(tmp_path / str(n), layers=n)) for n in (8, 6))
    found = without_blocks(whole, 2)
    assert found.weight_bytes == pytest.approx(short.weight_bytes, rel=1e-4)
    assert (found.linears, found.kv_bytes, found.attention_width) == (
        short.linears, short.kv_bytes, short.attention_width
    )  # fmt: skip


def test_devices_share_the_weights(llama_8b: ModelDirectory) -> None:
    one, two = (
        plan(llama_8b, PlanRequest("h100-sxm", devices=n, context=8192, schemes=("unquantized",))).planned[0].figures
        for n in (1, 2)
    )
    assert two.sequences == int((2 * 0.85 * 80 * GIB - two.weight_bytes) / GIB)
    assert one.tokens_per_second < two.tokens_per_second < 2 * one.tokens_per_second
    with pytest.raises(RuntimeProblem, match="8 key-value heads cannot be divided between 12"):
        plan(llama_8b, PlanRequest("h100-sxm", devices=12))


def test_the_least_compressed_that_meets_all_targets_is_recommended(llama_8b: ModelDirectory) -> None:
    targets = parse_targets(["tokens_per_second=200", "memory=24GB", "batch=2"])
    found = plan(
        llama_8b, PlanRequest("h100-sxm", context=8192, targets=targets, schemes=("unquantized", "W8A8", "W4A16"))
    )
    assert found.recommended is not None
    assert found.recommended.candidate.label == "W8A8"
    usable = 0.85 * 24e9 - found.recommended.figures.weight_bytes
    assert found.recommended.figures.sequences == int(usable / GIB)
    assert found.planned[0] is found.recommended


def test_what_cannot_be_met_is_said_with_the_closest(llama_8b: ModelDirectory) -> None:
    targets = parse_targets(["tokens_per_second=5000"])
    found = plan(llama_8b, PlanRequest("h100-sxm", context=8192, targets=targets, schemes=("unquantized", "W8A8")))
    assert found.recommended is None
    fastest = max(each.figures.tokens_per_second for each in found.planned)
    assert found.problem is not None
    assert f"{1 - fastest / 5000:.0%} below the target of 5,000" in found.problem
    nothing = plan(llama_8b, PlanRequest("h100-sxm", targets=parse_targets(["memory=1GB"]), schemes=("W4A16",)))
    assert nothing.problem is not None
    assert nothing.problem.startswith("no candidate fits into 1.0 GB")


def test_targets_within_the_error_are_doubted(llama_8b: ModelDirectory) -> None:
    plain = PlanRequest("h100-sxm", context=8192, schemes=("unquantized",))
    speed = plan(llama_8b, plain).planned[0].figures.tokens_per_second
    for share, doubts in ((0.99, 1), (0.7, 0)):
        request = PlanRequest(
            "h100-sxm", context=8192, schemes=("unquantized",), targets=[PlanTarget("tokens_per_second", share * speed)]
        )
        assert len(plan(llama_8b, request).doubts) == doubts


@pytest.mark.parametrize(
    ("text", "value"),
    [("memory=24GB", 24e9), ("memory=1.5 GiB", 1.5 * GIB), ("memory=7e9", 7e9), ("ttft=.5", 0.5), ("batch=16", 16)],
)
def test_targets_are_read(text: str, value: float) -> None:
    assert PlanTarget.parse(text).value == value


def test_every_choice_has_its_place_in_the_order() -> None:
    assert set(CACHE_LOSS) == set(BY_NAME)
    assert all(each.with_head >= each.linears for each in SCHEME_LOSS.values())


def test_the_order_is_the_one_that_was_measured() -> None:
    found = json.loads((REPOSITORY / "benchmarks/results/format_losses.json").read_text(encoding="utf-8"))["results"]
    for name, loss in SCHEME_LOSS.items():
        if name != UNQUANTIZED:
            assert (loss.linears, loss.with_head) == (round(found[name], 4), round(found[f"{name}, head too"], 4))
    assert {f"{name} cache": loss for name, loss in CACHE_LOSS.items() if loss} == {
        name: round(loss, 4) for name, loss in found.items() if name.endswith("cache")
    }
    assert block_loss(1 / 6) == pytest.approx(round(found["1 blocks dropped"], 4))


def test_a_quantized_checkpoint_varies_its_cache_alone(
    tiny: Callable[..., Path], recipe: Callable[..., Recipe]
) -> None:
    path = run(
        recipe(tiny(dtype=torch.bfloat16), {"evaluate": False}, scheme="W4A16", rounding="nearest", group_size=32)
    ).checkpoint
    found = plan(ModelDirectory("made", path), PlanRequest("h100-sxm"))
    assert {each.candidate.kv_cache_dtype for each in found.planned} == set(BY_NAME)
    assert {each.candidate.dropped for each in found.planned} == {0}
    with pytest.raises(RuntimeProblem, match="is quantized already"):
        plan(ModelDirectory("made", path), PlanRequest("h100-sxm", schemes=("W8A8",)))


def test_speed_is_measured_and_nothing_is_left(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = ModelDirectory("tiny", tiny(dtype=torch.bfloat16))
    found = plan(directory, PlanRequest("h100-sxm", schemes=("unquantized", "W8A8")))
    timed = measured.measure_formats(found, directory)
    have = {each.candidate.label for each in timed.planned if each.measured is not None}
    assert have == {"bfloat16", "W8A8", "W8A8, head too"}
    assert all(each.measured.tokens_per_second > 0 for each in timed.planned if each.measured is not None)
    assert list(tmp_path.iterdir()) == []

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measured, "run_load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured.measure_formats(found, directory)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_do_not_fit_are_extrapolated(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes what a layer between the two depths took: 10 ms and 2 ms, besides 1 ms of all."""
    found = measured._of_all(32, [4, 8], [(0.041, 0.009), (0.081, 0.017)], 100)
    assert 1 / found.tokens_per_second == pytest.approx(0.001 + 32 * 0.002)
    assert 100 / found.prefill_rate == pytest.approx(0.001 + 32 * 0.01)
    directory = ModelDirectory("tiny", tiny(dtype=torch.bfloat16, num_hidden_layers=4))
    size = model_size(directory)
    layer = 2 * sum(each.numel for each in size.linears) / 4
    room = (2 * (size.head.numel + size.vocabulary * size.hidden) + 2.5 * layer) / measured._MEMORY_SHARE
    monkeypatch.setattr(measured, "available_memory", lambda: int(room))
    timed = measured.measure_formats(plan(directory, PlanRequest("h100-sxm", schemes=("unquantized",))), directory)
    assert timed.planned[0].measured is not None
    assert timed.planned[0].measured.layers == 2


def test_a_model_that_does_not_fit_is_copied_from_the_host_by_hand(tmp_path: Path) -> None:
    """Llama-3-70B's layers in bfloat16 on an H100: what is not resident crosses PCIe for every step."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(tmp_path)
    request = PlanRequest("h100-sxm", context=4096, batch=8, schemes=("unquantized", "W4A16"))
    found = _by_label(plan(ModelDirectory("llama", tmp_path), request))
    entry = found["bfloat16"]
    assert not entry.figures.fits
    offload = entry.figures.offload
    assert offload is not None
    layers = 80 * 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    embeddings = 2 * 2 * 128256 * 8192
    cache = 8 * 4096 * 80 * 2 * 8 * 128 * 2
    resident = 80 * GIB * 0.85 - embeddings - 2 * layers / 80 - cache
    assert offload.read_bytes == pytest.approx(layers - resident, rel=1e-3)
    assert offload.tokens_per_second == pytest.approx(64e9 / (layers - resident), rel=1e-3)
    # Steps that compute as long as they copy: 140 billion operations a token at less than the tensor cores' peak.
    seconds = (layers - resident) / 64e9
    assert offload.hiding_tokens is not None
    assert offload.hiding_tokens < seconds * 989e12 / layers
    assert offload.hiding_batch is None  # eight sequences have a cache
    assert found["W4A16 g128"].figures.offload is None
    assert f"does not fit; {offload.sentence()}" in plan_table(
        plan(ModelDirectory("llama", tmp_path), request), everything=True
    )
