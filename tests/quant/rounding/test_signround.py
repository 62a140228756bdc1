"""SignRound against a float64 transcription of its paper, and what it promises of every number format."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.activations import ActivationRounding, quantize_inputs, rounded_inputs
from smelt.quant.grid import Grid, shared_scale
from smelt.quant.rounding.learned_weight import Learned, LearnedWeight
from smelt.quant.rounding.nearest import nearest
from smelt.quant.rounding.signround import SignroundOptions, signround
from smelt.quant.scheme import Scheme, resolve
from smelt.quant.scheme_names import SUPPORTED
from smelt.quant.stored.compressed_tensors import restore
from smelt.quant.stored.quantized_weight import QuantizedWeight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .reference import SignRoundReference

WINDOWS, LENGTH, WIDTH = 32, 16, 128


class _Block(nn.Module):
    """Two linears that add to what enters, as a feed-forward layer does."""

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.up = Conv1D(2 * WIDTH, WIDTH) if transposed else nn.Linear(WIDTH, 2 * WIDTH)
        self.down = Conv1D(WIDTH, 2 * WIDTH) if transposed else nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.silu(self.up(hidden)))


def _block(*, transposed: bool = False, dtype: torch.dtype = torch.float32) -> _Block:
    block = _Block(transposed=transposed)
    generator = torch.Generator().manual_seed(1)
    for module in (block.up, block.down):
        rows, columns = (1, 0) if transposed else (0, 1)
        drawn = torch.randn(module.weight.shape[rows], module.weight.shape[columns], generator=generator) * 0.15
        module.weight.data = drawn.T.contiguous() if transposed else drawn
        assert module.bias is not None
        module.bias.data = torch.randn(module.bias.shape, generator=generator) * 0.1
    return block.to(dtype).requires_grad_(False)


def _hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    """Correlated states with strong channels, as between real blocks."""
    generator = torch.Generator().manual_seed(2)
    mix = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    strength = torch.exp(torch.randn(WIDTH, generator=generator))
    return (torch.randn(WINDOWS, LENGTH, WIDTH, generator=generator) @ mix * strength).to(dtype)


def _layers(block: _Block, scheme: Scheme, stored: torch.dtype = torch.float32) -> dict[str, Learned]:
    return {
        name: Learned(
            module,
            scheme.args,
            stored,
            scheme.activations and ActivationRounding(scheme.activations),
            isinstance(module, Conv1D),
        )
        for name, module in (("up", block.up), ("down", block.down))
    }


def _learn(block: _Block, layers: dict[str, Learned], hidden: Tensor, **options: object) -> dict[str, QuantizedWeight]:
    targets = block(hidden)
    settled = SignroundOptions.model_validate({"iterations": 40, "batch": 4} | options)
    return signround(layers, block, lambda i: hidden[list(i)], lambda i: targets[list(i)], len(hidden), settled)


def _error(block: _Block, layers: dict[str, Learned], found: dict[str, Tensor], hidden: Tensor) -> float:
    """Of the block's outputs with these weights in it, and rounded inputs where the format has them."""
    targets = block(hidden)
    originals = {name: layer.module.weight.data for name, layer in layers.items()}
    hooks = [quantize_inputs(la.module, la.activations) for la in layers.values() if la.activations is not None]
    for name, layer in layers.items():
        values = found[name].to(hidden.dtype)
        layer.module.weight.data = values.T.contiguous() if layer.transposed else values
    error = (block(hidden) - targets).float().square().mean().item()
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        layer.module.weight.data = originals[name]
    return error


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_step_is_the_papers(bits: int, symmetric: bool) -> None:
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=16)
    generator = torch.Generator().manual_seed(bits)
    module = nn.Linear(48, 24, bias=False)
    module.weight.data = torch.randn(24, 48, generator=generator)
    original = module.weight.data.clone()
    ours = LearnedWeight(Learned(module, args, torch.float32), None, least=0.0)
    paper = SignRoundReference(original, bits, 16, symmetric=symmetric)
    # The largest weight of a symmetric group lies half way between two codes; a little beside it there is no doubt.
    ours.offset.fill_(0.01)
    paper.offset.data.fill_(0.01)
    for step in range(8):
        ours.write()
        written = paper.quantized()
        torch.testing.assert_close(module.weight.double(), written, rtol=0, atol=1e-5)
        inputs = torch.randn(64, 48, generator=generator)
        wanted = inputs @ original.T
        loss = (module(inputs) - wanted).square().mean()
        rate = 0.05 * (1 - step / 8)
        ours.learn(torch.autograd.grad(loss, module.weight)[0], rate, rate)
        paper.descend((inputs.double() @ written.T - wanted.double()).square().mean(), rate)
        torch.testing.assert_close(ours.offset.double(), paper.offset.flatten(1), rtol=0, atol=1e-6)
        for mine, factor in zip(ours.clip, paper.factors, strict=True):
            torch.testing.assert_close(mine.double(), factor.squeeze(-1), rtol=0, atol=1e-6)
    ours.release()
    assert torch.equal(module.weight, original)


ASYMMETRIC = Scheme(
    "asymmetric", QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=64), None, "pack-quantized"
)
SCHEMES = [resolve(name) for name in SUPPORTED] + [resolve("W3A16", -1), resolve("W4A16", 32), ASYMMETRIC]


@pytest.mark.few(3)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}-{s.args.group_size}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_format_learns_and_stays_on_its_grid(scheme: Scheme, dtype: torch.dtype) -> None:
    block, hidden = _block(dtype=dtype), _hidden(dtype)
    layers = _layers(block, scheme, dtype)
    found = _learn(block, layers, hidden, iterations=80)
    for name, layer in layers.items():
        restored = restore(found[name].stored(scheme), scheme)
        assert torch.equal(found[name].values.to(restored.dtype), restored), name
        assert torch.equal(found[name].grid.round(found[name].values), found[name].values), name
        assert not any("nearest" in note for note in found[name].notes)
        assert not layer.module.weight.requires_grad
    learned = _error(block, layers, {name: weight.values for name, weight in found.items()}, hidden)
    rounded = {name: nearest(layer.module.weight, scheme.args).values for name, layer in layers.items()}
    # With rounded inputs, these make most of the error, and no weight can undo them.
    share = 0.95 if scheme.activations is None else 0.995
    assert learned < share * _error(block, layers, rounded, hidden)


@torch.no_grad()
def test_it_learns_where_the_caller_has_no_use_for_gradients() -> None:
    block, hidden = _block(), _hidden()
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    found = _learn(block, _layers(block, resolve("W3A16", 64)), hidden)
    assert found["up"].notes == found["down"].notes == []
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter, before[name])


def test_transposed_weights_learn_the_same() -> None:
    hidden, scheme = _hidden(), resolve("W3A16", 64)
    plain, transposed = _block(), _block(transposed=True)
    few = {"iterations": 3, "learning_rate": 0.05}
    expected = _learn(plain, _layers(plain, scheme, torch.bfloat16), hidden, **few)
    found = _learn(transposed, _layers(transposed, scheme, torch.bfloat16), hidden, **few)
    for name in expected:
        assert expected[name].notes == []
        # Transposed sums are added in another order, so that a rare gradient of nearly 0 changes its sign.
        assert (found[name].values == expected[name].values).double().mean() > 0.99


def test_a_seed_decides_everything() -> None:
    block, hidden, scheme = _block(), _hidden(), resolve("W2A16", 64)
    first, second, other = (_learn(block, _layers(block, scheme), hidden, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first["up"].values, second["up"].values)
    assert torch.equal(first["down"].values, second["down"].values)
    assert not torch.equal(first["up"].values, other["up"].values)


@pytest.mark.parametrize(("iterations", "times"), [(30, 4), (100, 11)])
@pytest.mark.parametrize("rate", [0.02, 10.0])
def test_the_best_step_is_kept(rate: float, iterations: int, times: int) -> None:
    """Both where learning helps and where its steps are far too large for anything but harm."""
    block, hidden, scheme = _block(), _hidden(), resolve("W3A16", 64)
    layers, targets = _layers(block, scheme), block(hidden)
    judged: list[tuple[float, dict[str, Tensor]]] = []
    batches: list[Sequence[int]] = []

    def watched(states: Tensor) -> Tensor:
        out = block(states)
        if not torch.is_grad_enabled() and all(layer.module.weight.requires_grad for layer in layers.values()):
            error = (out - targets[list(batches[-1])]).square().mean().item()
            judged.append((error, {name: layer.module.weight.clone() for name, layer in layers.items()}))
        return out

    def read(batch: Sequence[int]) -> Tensor:
        batches.append(batch)
        return hidden[list(batch)]

    options = SignroundOptions(iterations=iterations, batch=4, learning_rate=rate)
    found = signround(layers, watched, read, lambda i: targets[list(i)], WINDOWS, options)
    pairs = [(judged[i][0] + judged[i + 1][0], judged[i][1]) for i in range(0, len(judged), 2)]
    assert len(pairs) == times
    best = min(pairs, key=lambda pair: pair[0])[1]
    for name in layers:
        torch.testing.assert_close(found[name].values, best[name], rtol=1e-6, atol=0)
    assert (best is pairs[0][1]) == (rate == 10.0)


def test_windows_that_judge_are_not_learned_from() -> None:
    block, hidden = _block(), _hidden()
    learned: set[int] = set()
    judging: set[int] = set()
    targets = block(hidden)

    def read(batch: Sequence[int]) -> Tensor:
        (learned if torch.is_grad_enabled() else judging).update(batch)
        return hidden[list(batch)]

    signround(
        _layers(block, resolve("W4A16", 64)),
        block,
        read,
        lambda i: targets[list(i)],
        WINDOWS,
        SignroundOptions(iterations=10, batch=4),
    )
    assert len(judging) == 8
    assert not learned & judging
    assert learned | judging == set(range(WINDOWS))


def test_one_window_is_enough() -> None:
    block, hidden = _block(), _hidden()[:1]
    layers = _layers(block, resolve("W4A16", 64))
    found = _learn(block, layers, hidden)
    rounded = {name: nearest(layer.module.weight, layer.args).values for name, layer in layers.items()}
    learned = _error(block, layers, {name: weight.values for name, weight in found.items()}, hidden)
    assert learned < _error(block, layers, rounded, hidden)


def test_an_expert_that_no_token_reached_is_rounded_to_nearest() -> None:
    block, hidden, scheme = _block(), _hidden(), resolve("W4A16", 64)
    idle = nn.Linear(WIDTH, 8, bias=False).requires_grad_(False)
    layers = _layers(block, scheme) | {"idle": Learned(idle, scheme.args, torch.float32)}
    found = _learn(block, layers, hidden)
    assert found["idle"].notes == ["rounded to nearest instead of signround: no calibration token reached it"]
    assert torch.equal(found["idle"].values, nearest(idle.weight, scheme.args).values)
    assert found["up"].notes == []
    alone = _learn(block, {"idle": layers["idle"]}, hidden)
    assert torch.equal(alone["idle"].values, found["idle"].values)


def test_outputs_that_are_not_finite_do_not_kill_a_run() -> None:
    block, hidden, scheme = _block(), _hidden(), resolve("W4A16", 64)
    hidden[:, 0, 0] = float("nan")
    found = _learn(block, _layers(block, scheme), hidden)
    assert "not finite" in found["up"].notes[0]
    assert torch.equal(found["up"].values, nearest(block.up.weight, scheme.args).values)


def test_an_interruption_gives_the_weights_back() -> None:
    block, hidden = _block(), _hidden()
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}

    def interrupt(step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        signround(
            _layers(block, resolve("W8A8")),
            block,
            lambda i: hidden[list(i)],
            lambda i: hidden[list(i)],
            WINDOWS,
            progress=interrupt,
        )
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter, before[name])
        assert not parameter.requires_grad
    assert not block.up._forward_pre_hooks


def test_a_global_scale_can_be_shared() -> None:
    block, hidden, scheme = _block(), _hidden(), resolve("NVFP4A16")
    weights = [block.up.weight, block.down.weight]
    shared = shared_scale(weights, scheme.args)
    layers = {
        n: Learned(la.module, la.args, la.stored, global_scale=shared) for n, la in _layers(block, scheme).items()
    }
    for weight in _learn(block, layers, hidden).values():
        assert weight.grid.global_scale is shared
    stacked = torch.cat([weight.reshape(-1, WIDTH) for weight in weights])
    assert torch.equal(shared, Grid.fit(stacked, scheme.args).global_scale)


def test_rounded_inputs_let_gradients_through() -> None:
    args = resolve("W8A8").activations
    assert args is not None
    module = nn.Linear(32, 8, bias=False)
    quantize_inputs(module, ActivationRounding(args))
    inputs = torch.randn(2, 5, 32, requires_grad=True)
    output = module(inputs)
    assert torch.equal(output, nn.functional.linear(rounded_inputs(inputs, args), module.weight))
    (gradient,) = torch.autograd.grad(output.sum(), inputs)
    torch.testing.assert_close(gradient, module.weight.sum(0).expand(2, 5, 32))


@pytest.mark.parametrize("name", ["W2A16", "W4A16_ASYM", "NVFP4A16"])
def test_what_was_pruned_stays_zero_wherever_gradients_pull(name: str) -> None:
    scheme = resolve(name, 64 if "NV" not in name else None)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(32, WIDTH, generator=generator)
    weight.view(-1, 4)[:, ::2] = 0
    module = nn.Linear(WIDTH, 32, bias=False)
    module.weight.data = weight.clone()
    learned = LearnedWeight(Learned(module, scheme.args, torch.float32), None, 0.0)
    for _ in range(20):
        learned.learn(torch.randn(32, WIDTH, generator=generator), 0.2, 0.01)
    learned.keep()
    found = restore(learned.result([]).stored(scheme), scheme)
    learned.release()
    assert (found.view(-1, 4)[:, ::2] == 0).all()
    assert (
        found.view(-1, 4)[:, 1::2] != restore(nearest(weight, scheme.args).stored(scheme), scheme).view(-1, 4)[:, 1::2]
    ).any()
