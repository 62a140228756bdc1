"""Cost models: against published speeds' arithmetic, and against prices that steps were made with."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from smelt.runtime import RuntimeProblem
from smelt.runtime.costs.calibration import Calibration, MeasuredStep, calibration, fit
from smelt.runtime.costs.device_cost import device_cost
from smelt.runtime.costs.fitted import FittedCost, features, kernel_of, linear_features, nearest_kernel
from smelt.runtime.costs.model_size import LinearSize, ModelSize
from smelt.runtime.costs.roofline import RooflineCost, Shares
from smelt.runtime.costs.swap_cost import SwapCost
from smelt.runtime.costs.work import LinearCost, StepWork
from smelt.runtime.devices.device import load_device
from smelt.runtime.scheduling.swapping import TransferCost
from smelt.system.errors import SmeltError

IDEAL = Shares(bandwidth=1.0, compute=1.0, step=0.0, layer=0.0)


def _llama(hidden: int, wide: int, layers: int, vocabulary: int, bits: int = 16) -> ModelSize:
    def linear(rows: int, columns: int, count: int) -> LinearSize:
        scale = rows * columns // 128 * 2 if bits < 16 else 0
        return LinearSize(
            rows, columns, count, f"W{bits}A16", bits, "16", rows * columns * bits // 8 + scale, is_float=bits == 16
        )

    shared = hidden // 4
    linears = (
        linear(hidden, hidden, 2 * layers),
        linear(shared, hidden, 2 * layers),
        linear(wide, hidden, 2 * layers),
        linear(hidden, wide, layers),
    )
    head = LinearSize(vocabulary, hidden, 1, "bfloat16", 16, "16", 2 * vocabulary * hidden, is_float=True)
    return ModelSize(
        "llama", layers, hidden, hidden * layers, vocabulary, linears, head, 0, 2 * shared * layers, 8 * layers, "auto",
        2, 8192,
    )  # fmt: skip


LLAMA_8B, LLAMA_8B_INT4 = (_llama(4096, 14336, 32, 128256, bits) for bits in (16, 4))
DECODE = StepWork(1, 1, 1, 1, chunks=1)


def test_one_sequence_is_bound_by_bandwidth_as_published() -> None:
    """Llama-3-8B at 3.35 TB/s: 223 tokens/s in bfloat16 and 721 in 4 bits with a bfloat16 head, at best."""
    h100 = load_device("h100-sxm")
    rates = [1 / RooflineCost(size, h100, shares=IDEAL).seconds(DECODE) for size in (LLAMA_8B, LLAMA_8B_INT4)]
    assert rates[0] == pytest.approx(223, rel=0.01)
    assert rates[1] == pytest.approx(721, rel=0.02)


def test_a_long_prompt_is_bound_by_products() -> None:
    """2 operations for each weight of the blocks and token, and 4 for each pair and channel of attention."""
    h100 = load_device("h100-sxm")
    tokens = 4096
    work = StepWork(tokens, 0, tokens, tokens * (tokens + 1) // 2, chunks=1, prompts=1)
    operations = 2 * sum(each.numel for each in LLAMA_8B.linears) * tokens + 4 * work.pairs * 4096 * 32
    found = RooflineCost(LLAMA_8B, h100, shares=IDEAL).seconds(work)
    # Hidden states between the linears pass through memory besides.
    assert 1 <= found / (operations / h100.value("flops_bf16")) < 1.15


@pytest.mark.parametrize("context", [100, 4096, 32768])
def test_layers_with_a_window_read_no_more_than_that(context: int) -> None:
    """Beside a sum over layers; three quarters of them see 1024 positions."""
    h100 = load_device("h100-sxm")
    size = replace(LLAMA_8B, windows=((1024, 0.75),))
    of_layer = size.kv_bytes / 32
    expected = 8 * (8 * of_layer * context + 24 * of_layer * min(context, 1024)) / h100.value("bandwidth")
    work = StepWork(8, 8, 8 * context, 8 * context, chunks=8)
    without = RooflineCost(size, h100, shares=IDEAL).seconds(replace(work, cached=0, pairs=0))
    assert RooflineCost(size, h100, shares=IDEAL).seconds(work) - without == pytest.approx(expected, rel=1e-3)
    seen = work.within(size.windows)
    assert features(size, work)["cached byte of decodes"] == pytest.approx(seen.cached * size.kv_bytes)
    # A prompt of which each query sees at most the window.
    prompt = StepWork(context, 1, context, context * (context + 1) // 2, 0, 1, 1, context * (context + 1) // 2)
    pairs = sum(0.25 * (at + 1) + 0.75 * min(at + 1, 1024) for at in range(context))
    assert prompt.within(size.windows).prompt_pairs == pytest.approx(pairs, rel=0.01)
    assert prompt.within(size.windows).cached == pytest.approx(context)


def test_devices_that_share_a_model_share_its_bytes_and_pay_for_joining() -> None:
    h100 = load_device("h100-sxm")
    one, two = (RooflineCost(LLAMA_8B, h100, tensor_parallel=n, shares=IDEAL).seconds(DECODE) for n in (1, 2))
    assert one / 2 < two < one


def test_a_device_without_a_constant_says_which() -> None:
    device = load_device("h100-sxm")
    without = replace(device, constants={k: v for k, v in device.constants.items() if k != "link"})
    with pytest.raises(RuntimeProblem, match=r"link .* is not known"):
        RooflineCost(LLAMA_8B, without, tensor_parallel=2)


def test_rows_between_two_knots_are_interpolated() -> None:
    assert linear_features("w4a16", 100.0, 1) == {"w4a16@1": 100.0}
    assert linear_features("w4a16", 100.0, 6) == {"w4a16@4": 50.0, "w4a16@8": 50.0}
    assert linear_features("w4a16", 100.0, 1024) == {"w4a16@512": 200.0}
    assert linear_features("w4a16", 100.0, 0) == {}


def test_a_kernel_that_was_not_measured_is_replaced_by_the_nearest() -> None:
    known = {"w16a16", "w4a16", "w8aint8"}
    assert nearest_kernel("w4a16", known) == "w4a16"
    assert nearest_kernel("w8a16", known) == "w4a16"
    assert nearest_kernel("w4aint8", known) == "w8aint8"
    assert nearest_kernel("f8afp8", {"w16a16", "w4a16"}) == "w4a16"
    assert kernel_of(LLAMA_8B_INT4.linears[0]) == "w4a16"
    assert kernel_of(LLAMA_8B.head) == "w16a16"


def _works(count: int, seed: int) -> list[StepWork]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        decodes, context = draw.randint(0, 32), draw.randint(1, 1000)
        prompt = draw.choice([0, 0, 5, 40, 130, 480])
        if not decodes and not prompt:
            decodes = 1
        start = draw.choice([0, 100])
        pairs = prompt * start + prompt * (prompt + 1) // 2
        cached = decodes * context + (start + prompt if prompt else 0)
        chunks, prompts = decodes + bool(prompt), int(bool(prompt))
        found.append(StepWork(decodes + prompt, chunks, cached, decodes * context + pairs, 0, chunks, prompts, pairs))
    return found


def _prices() -> dict[str, float]:
    draw = random.Random(9)
    sizes = [_llama(256, 768, 4, 1000), _llama(256, 768, 4, 1000, 4)]
    names = {name for size in sizes for work in _works(300, 1) for name in features(size, work)}
    return {
        name: draw.uniform(0.5, 2) * (1e-10 if "@" in name else 1e-5 if "step" in name else 1e-12) for name in names
    }


def _measured(noise: float = 0.0, seed: int = 2) -> dict[str, list[MeasuredStep]]:
    draw, prices = random.Random(seed), _prices()
    found = {}
    for hidden, layers in ((256, 4), (512, 8), (1024, 6)):
        for bits in (16, 4):
            size = _llama(hidden, 3 * hidden, layers, 1000, bits)
            cost = FittedCost(size, prices)
            found[f"{hidden} {bits}"] = [
                MeasuredStep(size, work, cost.seconds(work) * (1 + noise * draw.uniform(-1, 1)))
                for work in _works(200, draw.randrange(1000))
            ]
    return found


def test_the_sum_of_priced_features_is_the_cost() -> None:
    prices = _prices()
    for size in (LLAMA_8B, LLAMA_8B_INT4):
        cost = FittedCost(size, prices)
        for work in _works(50, 3):
            wanted = sum(prices.get(name, 0.0) * amount for name, amount in features(size, work).items())
            assert cost.seconds(work) == pytest.approx(wanted)


def test_a_fit_predicts_models_that_it_has_not_seen() -> None:
    """Steps made with known prices, 5% noise and some slowed down by other work: another shape's times come out."""
    steps = [step for each in _measured(noise=0.05).values() for step in each]
    slowed = [replace(step, seconds=20 * step.seconds) if i % 50 == 0 else step for i, step in enumerate(steps)]
    size = _llama(768, 2048, 7, 1000, 4)
    found, true = FittedCost(size, fit(slowed)), FittedCost(size, _prices())
    for work in _works(100, 17):
        assert found.seconds(work) == pytest.approx(true.seconds(work), rel=0.1)


def test_a_calibration_says_how_wrong_it_is_and_what_it_has_not_seen(tmp_path: Path) -> None:
    measured = _measured(noise=0.02)
    found = calibration(measured, device="test", made={"command": "none"}, memory_bytes=1 << 30)
    assert set(found.left_out) == set(measured)
    assert 0 < found.spread < 0.1
    inside = _llama(512, 1536, 5, 1000, 4)
    assert found.outside(inside, sequences=32, tokens=500, context=900) == []
    said = " ".join(found.outside(LLAMA_8B, sequences=300, tokens=500, context=900))
    assert "weight bytes: " in said
    assert "sequences: 300" in said
    eight = replace(inside, linears=tuple(replace(e, weight_bits=8, inputs="int8") for e in inside.linears))
    assert "(w8aint8) were not measured" in " ".join(found.outside(eight, sequences=1, tokens=1, context=900))
    found.write(tmp_path / "device.json")
    assert Calibration.read(tmp_path / "device.json") == found
    assert device_cost(str(tmp_path / "device.json")).kind == "calibrated"


def test_a_calibration_that_lacks_a_price_is_refused(tmp_path: Path) -> None:
    """Otherwise what it does not name would cost nothing."""
    found = calibration(_measured(), device="test", made={}, memory_bytes=1)
    prices = {name: price for name, price in found.prices.items() if name != "few decodes step"}
    replace(found, prices=prices).write(tmp_path / "device.json")
    with pytest.raises(SmeltError, match="no price of 'few decodes step'"):
        Calibration.read(tmp_path / "device.json")


def test_copies_take_each_transfers_own_time() -> None:
    """Ten blocks of 1 MB in transfers of 0.5 MB: twenty starts, and their bytes."""
    work = replace(DECODE, swapped=10)
    transfer = TransferCost(1_000_000, 500_000, 1e-3, 1e9)
    found = SwapCost(LinearCost(step=1.0), transfer).seconds(work)
    assert found == pytest.approx(1.0 + 20 * 1e-3 + 10 * 1e6 / 1e9)


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"version": 1}', '{"version": 1, "ranges": 3, "prices": {}}'])
def test_what_is_no_calibration_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(text)
    with pytest.raises(SmeltError, match=r"device\.json: "):
        device_cost(str(tmp_path / "device.json"))
