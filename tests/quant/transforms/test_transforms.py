"""Transforms as functions of tensors: against float64 transcriptions of their papers, and keeping the function."""

from __future__ import annotations

import pytest
import torch
from smelt.quant.grid import Grid
from smelt.quant.layer_stats import LayerStats, StatsCollector
from smelt.quant.scheme import resolve
from smelt.quant.transforms.awq import AwqOptions, awq
from smelt.quant.transforms.clip import ClipOptions, clip
from smelt.quant.transforms.equalize import equalize
from smelt.quant.transforms.hadamard import hadamard
from smelt.quant.transforms.learned_rotation import learn_rotation
from smelt.quant.transforms.link import Feeder, Link, Reader, Readers
from smelt.quant.transforms.options.base import TransformOptions
from smelt.quant.transforms.rotation import Rotation
from smelt.quant.transforms.smooth import SmoothOptions, smooth
from torch import Tensor


def _stats(inputs: Tensor) -> LayerStats:
    collector = StatsCollector(inputs.shape[-1], len(inputs), hessian=False)
    collector.add(inputs)
    return collector.result()


def _norm_link(
    columns: int, *, offset: float = 0.0, stored: torch.dtype = torch.float32, scheme: str = "W4A16"
) -> tuple[Link, Tensor]:
    """A norm that feeds two linears with inputs of very different sizes, and those inputs."""
    size = torch.logspace(-1, 1.5, columns)[torch.randperm(columns)]
    inputs = torch.randn(200, columns) * size
    norm = (torch.rand(columns) + 0.5).to(stored).float()
    group = resolve(scheme, 32) if scheme == "W4A16" else resolve(scheme)
    readers = tuple(Reader(name, torch.randn(48, columns) / columns**0.5, group) for name in ("q", "k"))
    feeder = Feeder(norm - offset, torch.randn(columns), torch.arange(columns), offset, stored)
    return Link(feeder, (Readers(readers, _stats(inputs)),)), inputs


def _outputs(link: Link, normalised: Tensor) -> list[Tensor]:
    """What the readers make of a norm's normalised input, in float64."""
    feeder = link.feeder
    weight = (feeder.weight.to(feeder.stored).double() + feeder.offset)[feeder.channels]
    bias = 0 if feeder.bias is None else feeder.bias.double()[feeder.channels]
    read = normalised.double() * weight + bias
    return [read @ reader.weight.double().T for group in link.groups for reader in group.members]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_moving_a_scale_keeps_the_function_though_norms_are_stored_in_few_bits(
    stored: torch.dtype, offset: float
) -> None:
    torch.manual_seed(0)
    link, _ = _norm_link(64, offset=offset, stored=stored)
    # a norm's stored weight is what its module computes with
    link.feeder.weight.copy_(link.feeder.weight.to(stored))
    link.feeder.bias.zero_()
    rows = torch.randn(20, 64)
    before = _outputs(link, rows)
    link.move(torch.rand(64) + 0.3)
    assert not torch.equal(before[0], _outputs(link, rows)[0])
    for found, expected in zip(_outputs(link, rows), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_several_inputs_that_share_a_feeder_channel_get_one_factor() -> None:
    """Grouped heads: value channel c feeds inputs c and c + 4."""
    torch.manual_seed(0)
    feeder = Feeder(torch.randn(4, 6), torch.randn(4), torch.arange(4).repeat(2), 0.0, torch.float32)
    reader = Reader("o", torch.randn(5, 8), resolve("W8A16", -1))
    inputs = torch.randn(30, 6)

    def run() -> Tensor:
        values = inputs.double() @ feeder.weight.double().T + feeder.bias.double()
        return values.repeat(1, 2) @ reader.weight.double().T

    before = run()
    peaks = (inputs @ feeder.weight.T + feeder.bias).repeat(1, 2)
    link = Link(feeder, (Readers((reader,), _stats(peaks)),))
    assert link.size == 4
    smooth(link, SmoothOptions(strength=0.7))
    torch.testing.assert_close(run(), before, rtol=1e-5, atol=1e-5)


def test_smoothing_is_the_papers() -> None:
    """SmoothQuant, equation 4: s_j = max|X_j|^a / max|W_j|^(1-a)."""
    torch.manual_seed(1)
    link, inputs = _norm_link(64)
    weights = torch.cat([reader.weight for reader in link.groups[0].members]).double()
    expected = inputs.double().abs().amax(0) ** 0.6 / weights.abs().amax(0) ** 0.4
    before = [reader.weight.double().clone() for reader in link.groups[0].members]
    smooth(link, SmoothOptions(strength=0.6))
    for old, reader in zip(before, link.groups[0].members, strict=True):
        torch.testing.assert_close(reader.weight.double(), old * expected, rtol=1e-5, atol=1e-6)


def test_equalised_linears_have_equal_ranges_channel_by_channel() -> None:
    """Nagel et al. 2019, equation 11: afterwards each channel's two ranges are the same."""
    torch.manual_seed(2)
    feeder = Feeder(
        torch.randn(24, 16) * torch.logspace(-2, 1, 24)[:, None], None, torch.arange(24), 0.0, torch.float32
    )
    reader = Reader("down", torch.randn(8, 24), resolve("W8A16", -1))
    expected = (feeder.weight.abs().amax(1) * reader.weight.abs().amax(0)).sqrt()
    inputs = torch.randn(10, 16).double()
    before = inputs @ feeder.weight.double().T @ reader.weight.double().T
    equalize(Link(feeder, (Readers((reader,), _stats(torch.randn(10, 24))),)), TransformOptions())
    torch.testing.assert_close(feeder.weight.abs().amax(1), expected)
    torch.testing.assert_close(reader.weight.abs().amax(0), expected)
    torch.testing.assert_close(
        inputs @ feeder.weight.double().T @ reader.weight.double().T, before, rtol=1e-5, atol=1e-5
    )


def _awq_reference(inputs: Tensor, weights: list[Tensor], group: int, steps: int) -> tuple[float, float]:
    """AWQ's search in float64 (arXiv:2306.00978, equations 4 and 5): the best exponent's loss, and that of none."""
    x = inputs.double()
    mean = x.abs().mean(0)

    def loss(scale: Tensor) -> float:
        total = 0.0
        for weight in weights:
            scaled = weight.double() * scale
            parts = scaled.unflatten(1, (-1, group))
            step = (parts.abs().amax(-1, keepdim=True) / 7.5).float().double()
            rounded = ((parts / step).round().clamp(-8, 7) * step).flatten(1) / scale
            total += (x @ (rounded - weight.double()).T).square().mean().item() * len(weight)
        return total

    found = []
    for i in range(1, steps + 1):
        scale = mean ** (i / steps)
        found.append(loss(scale / (scale.amax() * scale.amin()).sqrt()))
    return min(found), loss(torch.ones_like(mean))


def test_awq_finds_the_exponent_of_least_output_error() -> None:
    torch.manual_seed(3)
    link, inputs = _norm_link(64)
    before = [reader.weight.clone() for reader in link.groups[0].members]
    best, none = _awq_reference(inputs, before, 32, 20)
    assert best < 0.8 * none  # inputs of such different sizes are what it is for
    awq(link, AwqOptions(weigh_columns=False))
    scale = link.groups[0].members[0].weight[0] / before[0][0]
    total = 0.0
    for old, reader in zip(before, link.groups[0].members, strict=True):
        rounded = Grid.fit(reader.weight, reader.scheme.args).round(reader.weight) / scale
        total += (inputs.double() @ (rounded.double() - old.double()).T).square().mean().item() * len(old)
    # The largest weight of a group lies exactly between two codes, and float32 and float64 break the tie differently.
    assert total == pytest.approx(best, rel=0.02)


def test_awq_never_loses_to_no_scaling_and_keeps_the_function() -> None:
    torch.manual_seed(4)
    link, _ = _norm_link(64, stored=torch.bfloat16)
    link.feeder.bias.zero_()
    rows = torch.randn(20, 64)
    before = _outputs(link, rows)
    awq(link, AwqOptions())
    for found, expected in zip(_outputs(link, rows), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    even, _ = _norm_link(64)
    even.groups[0].stats.rows.copy_(torch.randn(200, 64))
    kept = [reader.weight.clone() for reader in even.groups[0].members]
    awq(even, AwqOptions(steps=1, weigh_columns=False))
    x = even.groups[0].stats.rows.double()
    scale = even.groups[0].members[0].weight[0] / kept[0][0]

    def error(weight: Tensor, old: Tensor, by: Tensor | float) -> float:
        rounded = Grid.fit(weight, resolve("W4A16", 32).args).round(weight) / by
        return (x @ (rounded.double() - old.double()).T).square().sum().item()

    pairs = list(zip(even.groups[0].members, kept, strict=True))
    assert sum(error(r.weight, old, scale) for r, old in pairs) <= 1.0001 * sum(
        error(old, old, 1.0) for _, old in pairs
    )


def test_awq_weighs_rounded_inputs_where_the_scheme_rounds_them() -> None:
    """At W8A8 an input outlier costs resolution of all other inputs, which scaling it away gives back."""
    torch.manual_seed(5)
    link, inputs = _norm_link(64, scheme="W8A8")
    outliers = inputs / inputs.abs().amax(0)
    outliers[:, 5] *= 200
    link.groups[0].stats.rows.copy_(outliers)
    before = link.groups[0].members[0].weight.clone()
    awq(link, AwqOptions())
    scale = link.groups[0].members[0].weight[0] / before[0]
    assert scale[5] > 3 * scale.median()


def test_clipping_takes_the_best_share_of_every_group() -> None:
    """Each group's error on its own inputs, over all shares that are tried, in float64."""
    torch.manual_seed(6)
    weight = torch.randn(12, 64)
    weight[:, ::16] *= 4
    inputs = torch.randn(300, 64) * torch.logspace(-1, 1, 64)
    args = resolve("W3A16", 32).args
    grid = Grid.fit(weight, args)
    found = clip(weight, grid, _stats(inputs), ClipOptions(least=0.5, steps=10))
    shares = [1 - i * 0.5 / 10 for i in range(10)]
    rows = inputs.double().unflatten(1, (2, 32))
    for row in range(12):
        for g in range(2):
            part = weight[row, 32 * g : 32 * g + 32]
            losses = {}
            # Of the extremes, and with the largest weight at the lowest code.
            for full in (grid.step[row, g], part[part.abs().argmax()] / -4):
                for share in shares:
                    step = full * share
                    codes = (part / step).round().clamp(-4, 3)  # in float32: extremes lie exactly between two codes
                    error = rows[:, g] @ (codes.double() * step.double() - part.double())
                    losses[step.item()] = error.square().sum().item()
            assert found.step[row, g].item() == pytest.approx(min(losses, key=losses.__getitem__), rel=1e-6)
    assert (found.step < 0).any()
    assert ((found.step > 0) & (found.step < grid.step)).any()


def test_clipping_leaves_floats_and_unreached_layers_alone() -> None:
    weight = torch.randn(4, 64)
    for args, inputs in (
        (resolve("NVFP4A16").args, torch.randn(9, 64)),
        (resolve("W4A16", 32).args, torch.zeros(0, 64)),
    ):
        grid = Grid.fit(weight, args)
        assert clip(weight, grid, _stats(inputs), ClipOptions()) is grid


def test_hadamard_matrices_are_orthogonal_and_of_ones() -> None:
    # 92, 116, 156, 172 and 188 have no construction here; 12 to 108 are those that model widths need.
    for order in (1, 2, 4, 12, 20, 24, 28, 36, 40, 44, 52, 60, 76, 96, 100, 108, 140, 180):
        matrix = hadamard(order)
        assert matrix is not None
        assert matrix.abs().eq(1).all()
        assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))
    assert hadamard(6) is None
    assert hadamard(92) is None


@pytest.mark.parametrize("size", [1, 2, 3, 48, 172, 256, 320, 576, 768, 2048])
def test_rotations_are_orthogonal_and_flat_where_a_hadamard_matrix_exists(size: int) -> None:
    rotation = Rotation.random(size, torch.Generator().manual_seed(7))
    matrix = rotation.matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    rows = torch.randn(3, size)
    torch.testing.assert_close(rotation.apply(rows), rows.double() @ matrix)
    if size not in (3, 172):
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))
    other = Rotation.random(size, torch.Generator().manual_seed(7))
    assert torch.equal(other.matrix(), matrix)


def test_rotations_that_keep_the_mean() -> None:
    matrix = Rotation.random(24, torch.Generator().manual_seed(8), keep_ones=True).matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(24, dtype=torch.float64))
    ones = torch.ones(24, dtype=torch.float64)
    torch.testing.assert_close(ones @ matrix, ones)
    torch.testing.assert_close(matrix @ ones, ones)
    assert matrix.abs().max() < 0.9  # it does rotate everything else


def test_parts_are_rotated_one_by_one() -> None:
    rotation = Rotation.random(4, torch.Generator().manual_seed(9))
    rows = torch.randn(2, 12)
    expected = torch.cat([rows[:, i : i + 4].double() @ rotation.matrix() for i in (0, 4, 8)], dim=1)
    torch.testing.assert_close(rotation.apply_to_parts(rows), expected)


def _peaks(rows: Tensor, matrix: Tensor) -> float:
    """The objective of learned rotations, in float64: the mean squared 8-norm of the rotated rows."""
    rotated = rows.double() @ matrix.double()
    return rotated.pow(8).sum(1).pow(1 / 4).mean().item()


def _hidden_signs(tokens: int, basis: Tensor, seed: int) -> Tensor:
    """Rows that are ones and minus ones in some rotated basis: no other basis has peaks as small."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (tokens, len(basis)), generator=generator).float() * 2 - 1) @ basis.T.float()


@pytest.mark.parametrize("keep_ones", [False, True])
def test_learned_rotations_are_orthogonal_and_find_the_basis_without_peaks(keep_ones: bool) -> None:
    basis, start = (
        Rotation.random(16, torch.Generator().manual_seed(seed), keep_ones=keep_ones).matrix() for seed in (5, 0)
    )
    learned = learn_rotation(start, _hidden_signs(2000, basis, 1), 250, 0, keep_ones=keep_ones)
    torch.testing.assert_close(learned.T @ learned, torch.eye(16).double(), rtol=0, atol=1e-14)
    if keep_ones:
        torch.testing.assert_close(learned.sum(1), torch.ones(16).double(), rtol=0, atol=1e-14)
    others = _hidden_signs(500, basis, 2)
    assert _peaks(others, start) > 4
    if keep_ones:  # not every basis can be reached
        assert _peaks(others, learned) < 0.6 * _peaks(others, start)
    else:
        assert _peaks(others, learned) == pytest.approx(16**0.25, rel=0.02)
    assert torch.equal(learned, learn_rotation(start, _hidden_signs(2000, basis, 1), 250, 0, keep_ones=keep_ones))


def test_a_rotation_of_parts_is_learned_on_the_peaks_of_the_whole() -> None:
    basis, start = (Rotation.random(16, torch.Generator().manual_seed(seed)).matrix() for seed in (6, 0))
    rows = _hidden_signs(4000, basis, 3).view(1000, 64)
    learned = torch.block_diag(*[learn_rotation(start, rows, 250, 0)] * 4)
    others = _hidden_signs(2000, basis, 4).view(500, 64)
    assert _peaks(others, torch.block_diag(*[start] * 4)) > 7
    assert _peaks(others, learned) == pytest.approx(64**0.25, rel=0.02)


@pytest.mark.parametrize(
    ("rows", "steps"), [(torch.zeros(100, 16), 5), (torch.randn(3, 16), 5), (torch.randn(50, 16), 0)]
)
def test_a_rotation_with_nothing_to_learn_from_stays_as_it_starts(rows: Tensor, steps: int) -> None:
    start = Rotation.random(16, torch.Generator().manual_seed(2)).matrix()
    assert torch.equal(learn_rotation(start, rows, steps, 0), start)


def test_a_row_of_zeros_does_not_stop_a_rotation_from_being_learned() -> None:
    """As the embedding of a padding token is, which may begin every window."""
    basis = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    rows = _hidden_signs(2000, basis, 1)
    start = torch.eye(16, dtype=torch.float64)
    with_zeros = torch.cat((rows[:700], torch.zeros(3, rows.shape[1]), rows[700:]))
    assert torch.equal(learn_rotation(start, with_zeros, 50, 0), learn_rotation(start, rows, 50, 0))
    assert not torch.equal(learn_rotation(start, with_zeros, 50, 0), start)
