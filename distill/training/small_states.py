"""AdamW with 8-bit moments, in blocks that each have a scale (after arXiv:2110.02861)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Elements that share a scale.
_BLOCK = 256
# Second moments are stored as eighths of powers of two below the block's largest.
_PER_OCTAVE = 8.0
_SAFE = 2e-3  # what was a code before is that code again, whatever the division's last bits


class SmallStatesAdamW(torch.optim.Optimizer):
    """AdamW with 8-bit moments: a quarter of the memory, for models whose moments would not fit.

    First moments are rounded to 255 even steps of each block; second moments to powers of two and eighths between them,
    since they span many magnitudes, and one rounded to zero would make its weight jump. Both are rounded up as often as is right
    in the mean, the same way whenever a training is repeated.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of AdamW on every parameter that has a gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    average, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
                else:
                    average, square = _plain(state, parameter.shape)
                state["step"] += 1
                count = float(state["step"])
                average.lerp_(parameter.grad, 1 - first)
                square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = (square / (1 - second**count)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(average, scale, value=-group["lr"] / (1 - first**count))
                state |= _small(average, square, count)

    def moments(self, parameter: Tensor, *, plain: bool) -> dict[str, Tensor]:
        """The moments of a parameter; ``plain`` in float32, so that they can be split anywhere, not only at blocks."""
        state = self.state.get(parameter, {})
        if not plain or not state:
            return dict(state)
        average, square = _plain(state, parameter.shape)
        return {"step": state["step"], "exp_avg": average, "exp_avg_sq": square}

    def go_on(self, parameter: Tensor, read: Callable[[str, Any], Tensor | None], rows: Any) -> None:
        """Restore saved moments, in either form."""
        step = read("step", None)
        if step is None:
            return
        plain = [read(key, rows) for key in ("exp_avg", "exp_avg_sq")]
        average, square = plain
        if average is not None and square is not None:
            kept = _small(average.to(parameter.device), square.to(parameter.device))
        else:
            stored = {key: read(key, None) for key in _SMALL}
            kept = {key: each.to(parameter.device, copy=True) for key, each in stored.items() if each is not None}
            if rows is not None:
                average, square = _plain(kept, torch.Size((rows.total, *parameter.shape[1:])))
                kept = _small(average[rows.start : rows.stop], square[rows.start : rows.stop])
        self.state[parameter] = {"step": step.clone(), **kept}


_SMALL = ("average", "average_scale", "square", "square_scale")


def _plain(state: dict[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
    average = _even(state["average"], state["average_scale"], shape)
    return average, _uneven(state["square"], state["square_scale"], shape)


def _small(average: Tensor, square: Tensor, step: float = 0.0) -> dict[str, Tensor]:
    """Rounded up or down so that it is right in the mean over steps: to the nearest, what changes by less than half a code never would.

    What was rounded before is unchanged.
    """
    places = torch.arange(_BLOCK, dtype=torch.float64)
    # Multiples of the golden ratio and its like are spread evenly, in time and over a block.
    bias = ((step * 0.6180339887498949 + places * 0.7548776662466927) % 1).clamp(_SAFE, 1 - _SAFE).float()
    bias = bias.to(average.device)
    return dict(zip(_SMALL, (*_to_even(average, bias), *_to_uneven(square, bias)), strict=True))


def _blocks(numbers: Tensor) -> Tensor:
    flat = numbers.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)


def _whole(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.view(-1)[: shape.numel()].view(shape)


def _to_even(numbers: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocks(numbers)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    codes = (blocks / scale.clamp_min(torch.finfo(scale.dtype).tiny)).add_(bias).floor_()
    return codes.clamp_(-127, 127).to(torch.int8), scale


def _even(codes: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    return _whole(codes * scale, shape)


def _to_uneven(numbers: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocks(numbers)
    scale = blocks.amax(1, keepdim=True).clamp_min(torch.finfo(blocks.dtype).tiny)
    # 255 means zero.
    octaves = (-(blocks / scale).log2_() * _PER_OCTAVE).add_(bias).floor_().clamp_(0, 254)
    return torch.where(blocks == 0, 255.0, octaves).to(torch.uint8), scale


def _uneven(codes: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    numbers = torch.exp2(codes.to(scale.dtype) / -_PER_OCTAVE).mul_(scale)
    return _whole(numbers.masked_fill_(codes == 255, 0.0), shape)
