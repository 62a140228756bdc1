"""SignRound: learn which way to round, and where to clip, by signed descent (Cheng et al., 2023, arXiv:2309.05516)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...models.causal_attention import StripedAttention
from ..activations import quantize_inputs
from ..stored.quantized_weight import QuantizedWeight
from .learned_weight import Learned, LearnedWeight
from .options.signround import SignroundOptions

# Hidden states ``[windows, length, width]`` of the windows with these numbers.
Read = Callable[[Sequence[int]], Tensor]

# How often the learned state is evaluated, and the minimum number of steps between: an evaluation costs two forward
# passes, and a step about three.
_JUDGED, _STEPS_BETWEEN = 10, 10
# The number of held-out batches, and the largest share of all windows that they may take.
_JUDGING_BATCHES, _JUDGING_SHARE = 2, 4


def signround(
    layers: Mapping[str, Learned],
    run: Callable[[Tensor], Tensor],
    inputs: Read,
    targets: Read,
    windows: int,
    options: SignroundOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, QuantizedWeight]:
    """Round one block's linears together, so that the block's outputs come closest to ``targets``.

    Every weight gets an offset that is added before rounding, every group a factor on its range; both
    are updated by the sign of the gradient of the outputs' mean squared error. A few windows are held out:
    the error on them is measured at the start, at the end and up to nine times between, and the best state
    is returned. So on them the result is never worse than the start, which is rounding to nearest with
    ranges fitted to the inputs.

    As in the authors' code, ``inputs`` are the outputs of the quantized blocks before this one, and
    ``targets`` the float block's outputs for float inputs: the block then also compensates for their errors.

    While it runs, the modules' weights are overwritten; afterwards, and if it is interrupted, they are restored.

    Args:
        layers: the block's linears by name. Their inputs must not be rounded yet; that is done here.
        run: the block, from hidden states ``[windows, length, width]`` to the same, differentiable.
        inputs, targets: the block's input hidden states, and its target outputs.
        windows: how many there are.
        options: see :class:`SignroundOptions`.
        progress: called after every step with the number of steps done.
    """
    options = options or SignroundOptions()
    order = _order(windows, torch.Generator().manual_seed(options.seed))
    apart = min(_JUDGING_BATCHES * options.batch, windows // _JUDGING_SHARE)
    judges, pupils = (order[:apart], order[apart:]) if apart else (order, order)

    def error(batch: Sequence[int]) -> Tensor:
        with StripedAttention():
            found = run(inputs(batch))
        return nn.functional.mse_loss(found.float(), targets(batch).float())

    with torch.no_grad(), ExitStack() as held:
        importance = _importance(layers, lambda batch: run(inputs(batch)), _batches(judges, options.batch))
        weights: dict[str, LearnedWeight] = {}
        for name, layer in layers.items():
            weights[name] = LearnedWeight(layer, importance.get(name), options.least_clip)
            held.callback(weights[name].release)
            if layer.activations is not None:
                held.callback(quantize_inputs(layer.module, layer.activations).remove)
        best = _descend(weights, error, judges, pupils, options, progress)
        return {name: weight.result(_notes(weight, best, len(judges))) for name, weight in weights.items()}


def _descend(
    weights: dict[str, LearnedWeight],
    error: Callable[[Sequence[int]], Tensor],
    judges: list[int],
    pupils: list[int],
    options: SignroundOptions,
    progress: Callable[[int], None] | None,
) -> dict[int, float]:
    """Learn, and save the best state. Returns the successive lowest errors, by step."""
    parameters = [weight.parameter for weight in weights.values()]
    best: dict[int, float] = {}

    def judge(step: int) -> None:
        found = sum(error(part).item() * len(part) for part in _batches(judges, options.batch)) / len(judges)
        if found < min(best.values(), default=math.inf):
            best[step] = found
            for weight in weights.values():
                weight.keep()

    for weight in weights.values():
        weight.write()
    draws = _draws(pupils, options.batch, torch.Generator().manual_seed(options.seed))
    first_rate = options.learning_rate or 1 / options.iterations
    often = max(_STEPS_BETWEEN, options.iterations // _JUDGED)
    for step in range(options.iterations):
        if step % often == 0:
            judge(step)
        with torch.enable_grad():
            loss = error(next(draws))
        if not loss.requires_grad or not loss.isfinite():
            break  # no token reaches these layers, or the gradient is zero
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        rate = first_rate * (1 - step / options.iterations)
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            if gradient is not None:
                weight.learn(gradient, rate, rate if options.learn_clipping else 0.0)
                weight.write()
        if progress is not None:
            progress(step + 1)
    judge(options.iterations)
    return best


def _notes(weight: LearnedWeight, best: dict[int, float], judges: int) -> list[str]:
    if not best:
        return ["rounded to nearest instead of signround: the block's outputs on the calibration text are not finite"]
    if not weight.reached:
        return ["rounded to nearest instead of signround: no calibration token reached it"]
    if len(best) == 1:
        return [f"signround did not lower the block's error on {judges} windows; its starting values are kept"]
    return []


def _batches(windows: list[int], size: int) -> Iterator[list[int]]:
    return (windows[start : start + size] for start in range(0, len(windows), size))


def _draws(windows: list[int], size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Batches of one size, endlessly; a window repeats only after (nearly) all others."""
    size = min(size, len(windows))
    while True:
        order = _order(len(windows), generator)
        for start in range(0, len(order) - size + 1, size):
            yield [windows[place] for place in order[start : start + size]]


def _order(count: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(count, generator=generator, device="cpu").tolist()


def _importance(
    layers: Mapping[str, Learned], pass_through: Callable[[list[int]], Any], batches: Iterator[list[int]]
) -> dict[str, Tensor]:
    """Mean squares of each layer's input columns, up to a common factor."""
    sums: dict[str, Tensor] = {}

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            squares = inputs[0].float().square().flatten(0, -2).sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    with ExitStack() as held:
        for name, layer in layers.items():
            held.callback(layer.module.register_forward_pre_hook(hook_of(name)).remove)
        for batch in batches:
            pass_through(batch)
    return sums
