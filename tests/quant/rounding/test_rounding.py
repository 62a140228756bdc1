"""GPTQ, round to nearest and HQQ against float64 transcriptions of their papers, and each where it must not fail."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.grid import Grid
from smelt.quant.layer_stats import LayerStats, StatsCollector, output_error
from smelt.quant.rounding import METHODS
from smelt.quant.rounding.gptq import GptqOptions, gptq
from smelt.quant.rounding.hqq import HqqOptions, hqq, shrink
from smelt.quant.rounding.nearest import NearestOptions, nearest
from smelt.quant.scale_search import fit_scales
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import SUPPORTED
from smelt.quant.stored.compressed_tensors import restore
from smelt.quant.stored.quantized_weight import QuantizedWeight
from smelt.system.storage.tensor_files import SafetensorsFile
from torch import Tensor

from ...tiny import SMELT_6M
from .reference import gptaq, gptq_by_elimination, hqq_zero_point


def _inputs(columns: int, tokens: int = 512, seed: int = 0) -> Tensor:
    """Correlated inputs with a few strong channels, as real layers have."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    strength = torch.exp(torch.randn(columns, generator=generator))
    return torch.randn(tokens, columns, generator=generator) @ mix * strength


def _stats(inputs: Tensor) -> LayerStats:
    collector = StatsCollector(inputs.shape[-1], len(inputs), hessian=True)
    for batch in inputs.split(100):
        collector.add(batch)
    return collector.result()


def _layers() -> list[tuple[str, Tensor]]:
    real = SafetensorsFile(SMELT_6M / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    return [
        ("random", torch.randn(48, 256, generator=generator)),
        ("q_proj", real.load("model.layers.2.self_attn.q_proj.weight")),
        ("down_proj", real.load("model.layers.4.mlp.down_proj.weight")[:48, :384]),
    ]


LAYERS = _layers()


@pytest.mark.few(16)
@pytest.mark.parametrize(("name", "weight"), LAYERS, ids=[name for name, _ in LAYERS])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("activation_order", [True, False])
@pytest.mark.parametrize("group", [64, -1])
def test_gptq_is_the_papers_elimination(
    name: str, weight: Tensor, bits: int, activation_order: bool, group: int
) -> None:
    scheme = resolve(f"W{bits}A16", group)
    stats = _stats(_inputs(weight.shape[1]))
    assert stats.hessian is not None
    found = gptq(weight, scheme.args, stats, GptqOptions(activation_order=activation_order, block=32, sweeps=0))
    columns = weight.shape[1]
    order = (
        torch.argsort(stats.hessian.diagonal(), descending=True, stable=True)
        if activation_order
        else torch.arange(columns)
    )
    width = columns if group == -1 else group
    expected = gptq_by_elimination(weight, stats.hessian, found.grid.scale, width, bits, 0.01, order)
    # A code on the edge between two may fall either way in float32; what follows from it is then as good.
    same = (found.values.double() - expected).abs() <= 1e-5 * expected.abs().max()
    ours, reference = output_error(weight, found.values, stats), output_error(weight, expected, stats)
    assert ours == pytest.approx(reference, rel=0.01)
    assert same.double().mean() > 0.97
    assert found.notes == []


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_aware_gptq_reaches_for_the_least_squares_optimum(bits: int) -> None:
    """In float64 the target is a damped regression of the plain outputs on the inputs at hand; the rest is GPTQ."""
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(12))
    inputs = _inputs(128, 1024)
    turn, noise = torch.randn(2, 1024, 128, generator=torch.Generator().manual_seed(13))
    plain = inputs + 0.3 * inputs @ turn[:128] / 128**0.5 + 0.1 * inputs.std() * noise
    collector = StatsCollector(128, len(inputs), hessian=True, shift=True)
    for batch, unrounded in zip(inputs.split(100), plain.split(100), strict=True):
        collector.add(batch, None, unrounded)
    stats = collector.result()
    assert stats.hessian is not None
    args = resolve(f"W{bits}A16", 64).args
    plain_scales = {"scale_search": False, "activation_order": False, "sweeps": 0}
    found = gptq(weight, args, stats, GptqOptions(error_aware=1.0, **plain_scales))

    w, x, f = weight.double(), inputs.double(), plain.double()
    pull = (0.01 * stats.hessian.diagonal().double().mean() * len(x)).sqrt()
    pulled = torch.cat([x, pull * torch.eye(128).double()]), torch.cat([f @ w.T, pull * w.T])
    target = torch.linalg.lstsq(*pulled).solution.T
    expected = gptq_by_elimination(target, stats.hessian, found.grid.scale, 64, bits, 0.01, torch.arange(128))

    def lost(values: Tensor) -> float:
        return (f @ w.T - x @ values.double().T).norm().item()

    same = (found.values.double() - expected).abs() <= 1e-5 * expected.abs().max()
    assert same.double().mean() > 0.97
    assert lost(found.values) == pytest.approx(lost(expected), rel=0.01)
    assert lost(found.values) < lost(gptaq(weight, plain, inputs, found.grid.scale, 64, bits, 0.01))
    without = gptq(weight, args, stats, GptqOptions(**plain_scales))
    assert lost(found.values) < 0.95 * lost(without.values)


@pytest.mark.parametrize("activation_order", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_groups_refitted_where_they_are_reached_are_the_papers_elimination(bits: int, activation_order: bool) -> None:
    weight = torch.randn(32, 192, generator=torch.Generator().manual_seed(14))
    # A group's largest magnitude lies between two codes; if it is positive there is only one to take.
    weight = torch.where(weight < 0, 0.5 * weight, weight)
    stats = _stats(_inputs(192))
    assert stats.hessian is not None
    energy = stats.hessian.diagonal().view(3, 64)
    groups = energy.sum(1).argsort(descending=True).tolist() if activation_order else range(3)
    order = torch.cat(
        [64 * g + (energy[g].argsort(descending=True) if activation_order else torch.arange(64)) for g in groups]
    )
    args = resolve(f"W{bits}A16", 64).args
    options = GptqOptions(refit_groups=True, scale_search=False, activation_order=activation_order, sweeps=0)
    found = gptq(weight, args, stats, options)

    def fit(moved: Tensor) -> Tensor:
        return (moved.abs().amax(1) / ((2**bits - 1) / 2)).float()

    expected = gptq_by_elimination(weight, stats.hessian, fit, 64, bits, 0.01, order)
    same = (found.values.double() - expected).abs() <= 1e-4 * expected.abs().max()
    assert same.double().mean() > 0.95
    assert output_error(weight, found.values, stats) == pytest.approx(output_error(weight, expected, stats), rel=0.02)
    assert not torch.equal(found.grid.scale, Grid.fit(weight, args).scale)
    assert torch.equal(restore(found.stored(scheme := resolve(f"W{bits}A16", 64)), scheme), found.values)


@pytest.mark.parametrize("name", SUPPORTED)
def test_gptq_beats_nearest_in_every_format(name: str) -> None:
    scheme = resolve(name)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(6), dtype=torch.float32).to(torch.bfloat16)
    stats = _stats(_inputs(256))
    better = output_error(weight, gptq(weight, scheme.args, stats).values, stats)
    worse = output_error(weight, nearest(weight, scheme.args).values, stats)
    assert better is not None
    assert worse is not None
    assert better < 0.9 * worse


def test_block_size_changes_speed_only() -> None:
    weight = torch.randn(16, 192, generator=torch.Generator().manual_seed(7))
    stats = _stats(_inputs(192))
    args = resolve("W4A16", 64).args
    results = [
        output_error(weight, gptq(weight, args, stats, GptqOptions(block=b)).values, stats) for b in (1, 50, 192)
    ]
    assert results == pytest.approx([results[0]] * 3, rel=5e-3)


def test_an_indefinite_hessian_raises_the_damping_and_says_so() -> None:
    weight = torch.randn(8, 64)
    hessian = _stats(_inputs(64)).hessian
    assert hessian is not None
    mean = hessian.diagonal().mean()
    values, vectors = torch.linalg.eigh(hessian)
    values[0] = -0.05 * mean  # past the first damping, within the next
    broken = vectors @ values.diag() @ vectors.T
    result = gptq(weight, resolve("W4A16", 32).args, LayerStats(broken, torch.zeros(0, 64), 512))
    assert result.notes == ["gptq raised its damping from 0.01 to 0.1"]
    assert torch.isfinite(result.values).all()


def test_a_hopeless_hessian_falls_back_to_nearest_and_says_so() -> None:
    weight = torch.randn(8, 64)
    args = resolve("W4A16", 32).args
    hopeless = -torch.eye(64) + 2 * torch.diag((torch.arange(64) < 32).float())
    result = gptq(weight, args, LayerStats(hopeless, torch.zeros(0, 64), 512))
    assert "not positive definite" in result.notes[0]
    assert torch.equal(result.values, nearest(weight, args).values)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_do_not_kill_a_run(poison: float) -> None:
    hessian = torch.eye(64)
    hessian[3, 3] = poison
    result = gptq(torch.randn(8, 64), resolve("W4A16", 32).args, LayerStats(hessian, torch.zeros(0, 64), 512))
    assert "not finite" in result.notes[0]


def test_an_expert_that_no_token_reached_is_rounded_to_nearest() -> None:
    weight = torch.randn(8, 64)
    args = resolve("W4A16", 32).args
    result = gptq(weight, args, StatsCollector(64, 100, hessian=True).result())
    assert "no calibration token" in result.notes[0]
    assert torch.equal(result.values, nearest(weight, args).values)


def test_channels_that_are_never_used_do_not_break_gptq() -> None:
    inputs = _inputs(128)
    inputs[:, 5] = 0
    inputs[:, 77] = 0
    weight = torch.randn(16, 128)
    result = gptq(weight, resolve("W4A16", 64).args, _stats(inputs))
    assert torch.isfinite(result.values).all()
    assert result.notes == []
    # They may be used after calibration, so they are rounded as well as round-to-nearest would.
    silent = [5, 77]
    assert torch.equal(result.values[:, silent], result.grid.round(weight)[:, silent])


def test_dead_channels_do_not_damp_the_others() -> None:
    """Also where inputs are small, as those of an o_proj: the error is what it is without dead channels."""
    weight, inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(4)), 0.01 * _inputs(256)
    args = resolve("W3A16", 64).args
    errors = []
    for dead in (0, 1, 16):
        some = inputs.clone()
        some[:, :dead] = 0
        found = gptq(weight, args, _stats(some)).values
        errors.append(float(((weight - found) @ some.T).norm() / (weight @ some.T).norm()))
    assert max(errors) < 1.15 * errors[0]


def test_hqq_zero_points_are_the_papers() -> None:
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=64)
    weight = torch.rand(24, 256, generator=torch.Generator().manual_seed(8)).pow(3) * 4 - 0.5
    start = Grid.fit(weight, args)
    found = hqq(weight, args)
    options = HqqOptions()
    assert start.zero is not None
    assert found.grid.zero is not None
    # The stored zero-point is an integer; the paper's is real, so the reference is rounded the same way.
    reference = torch.cat(
        [
            hqq_zero_point(
                weight.view(24 * 4, 64),
                start.step.view(-1, 1),
                start.zero.view(-1, 1),
                4,
                options.lp_norm,
                options.beta,
                options.kappa,
                options.iterations,
            )
        ]
    ).view(24, 4)
    assert torch.equal(found.grid.zero, reference.round().clamp(-8, 7).float())


@pytest.mark.parametrize("scheme", ["W2A16", "W3A16", "W4A16", "W4A16_ASYM"])
def test_hqq_lowers_its_own_objective(scheme: str) -> None:
    options = HqqOptions()
    for name, weight in LAYERS:
        for group in (32, 128):
            args = resolve(scheme, group).args
            errors = [
                (weight.float() - method(weight, args).values).abs().pow(options.lp_norm).mean()
                for method in (hqq, nearest)
            ]
            assert errors[0] < errors[1], (name, group)


def test_hqq_scale_step_is_the_closed_form() -> None:
    """One iteration from the extremes' scale, and one from that of the other sign; the best of the four, in float64."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(9))
    args = resolve("W3A16", 64).args
    largest = weight.gather(1, weight.abs().argmax(1, keepdim=True))
    candidates = []
    for step in (Grid.fit(weight, args).step, largest / -4):
        # The largest weight of a group sits on a tie (3.5 steps), so the division must be the one that the code does.
        codes, start = (weight / step).round().clamp(-4, 3).double(), step.double()
        error = weight.double() - codes * start
        explained = weight.double() - shrink(error, 10.0, 0.7)
        candidates += [start, (codes * explained).sum(1, keepdim=True) / codes.square().sum(1, keepdim=True)]
    found = hqq(weight, args, None, HqqOptions(iterations=1)).grid.step
    losses = torch.cat(
        [
            (weight - (weight / s.float()).round().clamp(-4, 3) * s).abs().pow(0.7).mean(1, keepdim=True)
            for s in candidates
        ],
        dim=1,
    )
    expected = torch.cat(candidates, dim=1).gather(1, losses.argmin(1, keepdim=True))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert (found < 0).any()
    assert (found > 0).any()


def test_hqq_says_when_a_format_has_nothing_for_it_to_fit() -> None:
    result = hqq(torch.randn(128, 128), resolve("FP8_DYNAMIC").args)
    assert "defined for integer formats" in result.notes[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_same_weight_gives_the_same_bits(method: str) -> None:
    weight = torch.randn(32, 128).to(torch.bfloat16)
    stats = _stats(_inputs(128))
    args = resolve("W8A16" if method == "nested" else "W4A16", 64).args
    options = METHODS[method].options()
    first, second = (METHODS[method].function(weight, args, stats, options) for _ in range(2))
    assert torch.equal(first.values, second.values)


def test_statistics_are_the_sums_they_claim_to_be() -> None:
    inputs = _inputs(700, 333)
    stats = _stats(inputs)
    expected = inputs.double().T @ inputs.double() / 333
    assert stats.hessian is not None
    torch.testing.assert_close(stats.hessian.double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(stats.hessian, stats.hessian.T)
    assert stats.tokens == 333
    assert torch.equal(stats.rows, inputs)


def test_the_sample_of_rows_is_even_and_bounded() -> None:
    collector = StatsCollector(4, 10_000, hessian=False)
    for start in range(0, 10_000, 700):
        collector.add(torch.arange(start, min(start + 700, 10_000), dtype=torch.float32)[:, None].expand(-1, 4))
    rows = collector.result().rows[:, 0]
    assert 980 <= len(rows) <= 1015
    for start in range(0, 10_000, 700):
        mine = rows[(rows >= start) & (rows < start + 700)]
        assert torch.equal(mine, torch.arange(int(mine[0]), min(start + 700, 10_000), 10, dtype=torch.float32))
        assert mine[0] < start + 10


def test_no_position_of_a_window_is_preferred_in_the_sample() -> None:
    """The first one is unlike all others in many models."""
    collector = StatsCollector(2, 1024 * 2048, hessian=False)
    positions = torch.arange(2048, dtype=torch.float32)
    for _ in range(1024):
        collector.add(torch.stack([positions, torch.randn(2048)], 1))
    found = collector.result().rows[:, 0]
    assert len(found) == 1024
    assert (found == 0).sum() < 10
    assert 900 < found.mean() < 1150


def test_a_scale_of_either_sign_gives_the_largest_weight_the_extra_code() -> None:
    """Two's complement has one more code on its negative side; at 2 bits that is a quarter of all codes."""
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    args = resolve("W2A16", 64).args
    grid = Grid.fit(weight, args)
    fitted = fit_scales(weight, grid, torch.ones(128))
    assert (fitted.scale < 0).float().mean() > 0.2
    groups = weight.double().view(64, 2, 64)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    signed = largest / -2
    candidates = [grid.scale.double()[..., None] * f for f in (1.0, 0.8, 0.6)] + [signed * f for f in (1.0, 0.8, 0.6)]
    least = torch.stack([(groups - (groups / s).round().clamp(-2, 1) * s).square().sum(-1) for s in candidates]).amin(0)
    found = (groups.flatten(1) - fitted.round(weight).double()).square().view(64, 2, 64).sum(-1)
    assert (found <= least * (1 + 1e-5)).all()
    restored = restore(QuantizedWeight(fitted.round(weight), fitted).stored(resolve("W2A16", 64)), resolve("W2A16", 64))
    assert torch.equal(restored, fitted.round(weight))


def test_nearest_searches_scales_by_the_energy_of_its_inputs() -> None:
    """The error that is searched for, in float64: lower than the extremes' scales give, and lower than without inputs."""
    torch.manual_seed(1)
    weight, args = torch.randn(32, 128), resolve("W3A16", 32).args
    inputs = torch.randn(200, 128) * torch.logspace(-1, 1, 128)[torch.randperm(128)]
    stats, none = _stats(inputs), _stats(inputs[:0])
    energy = inputs.double().square().mean(0)

    def error(options: NearestOptions, stats: LayerStats) -> float:
        return ((nearest(weight, args, stats, options).values - weight).double().square() * energy).sum().item()

    searched = NearestOptions(scale_search=True)
    plain = error(NearestOptions(), stats)
    assert error(searched, stats) < 0.85 * error(searched, none) < 0.85 * plain
