"""One weight whose rounding and clipping are learned: its codes, and their gradient updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from ..activations import ActivationRounding
from ..grid import Grid, extremes, largest_code, round_codes, shared_scale, spacing
from ..scale_search import fit_scales
from ..stored.quantized_weight import QuantizedWeight
from ..zeros import not_pruned

# Rows are processed in chunks that fit in the processor's cache.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class Learned:
    """A linear whose rounding is to be learned.

    Attributes:
        module: computes with its ``weight`` of ``[rows, columns]``.
        args: the number format.
        stored: the dtype that scales are stored in.
        activations: how its inputs are rounded at run time, or None.
        transposed: whether ``module.weight`` is ``[columns, rows]``, as in GPT-2's Conv1D.
        global_scale: NVFP4's, if the weight shares it with others; computed from the weight by default.
        weight: the weight to round, ``[rows, columns]``; the module's weight if None.
    """

    module: nn.Module
    args: QuantizationArgs
    stored: torch.dtype
    activations: ActivationRounding | None = None
    transposed: bool = False
    global_scale: Tensor | None = None
    weight: Tensor | None = None


class LearnedWeight:
    """Offsets ``v`` and range factors ``c`` of one weight, which then is ``s(c) round(w / s(c) + v)``.

    Asymmetric integers have two factors, one for each end of the range. In a float format ``v`` counts
    in the local spacing of the codes.

    The module's parameter is overwritten by :meth:`write` and restored by :meth:`release`. Gradients
    are taken with respect to that parameter; those of ``v`` and ``c`` are derived by hand, since signed
    descent needs signs only: ``v`` has the gradient's sign, or the opposite where the step is negative,
    wherever the code is not clipped.

    Attributes:
        parameter: the module's weight parameter.
        offset: ``v``, float32 ``[rows, columns]``.
        clip: ``c``, float32 ``[1 or 2, rows, groups]``; of two the first is for the upper end.
        reached: whether any gradient has been received.

    Args:
        layer: what to learn.
        importance: of its columns; with it the range starts where :func:`fit_scales` puts it.
        least: the smallest range factor.
    """

    def __init__(self, layer: Learned, importance: Tensor | None, least: float) -> None:
        self._layer, self._args = layer, layer.args
        parameter = layer.module.weight
        assert isinstance(parameter, Tensor)
        self.parameter = parameter
        self._original = parameter.data
        self._weight = self._oriented(self._original) if layer.weight is None else layer.weight
        self._low, self._high, self._width = extremes(self._weight.float(), self._args)
        self._global = layer.global_scale
        if self._global is None:
            self._global = shared_scale([self._weight], self._args)
        self._start: Tensor | None = None  # initial scales, of either sign
        self.offset = torch.zeros(self._weight.shape)
        self.clip = torch.ones(1 if self._args.symmetric else 2, *self._low.shape)
        if importance is not None and self._args.type == "int" and self._args.symmetric:
            widest = Grid.fit(self._weight, self._args, layer.stored)
            self._start = fit_scales(self._weight.float(), widest, importance).scale.float()
            self.clip[0] = self._start.abs() / widest.scale.float()
        self._least, self._highest = least, self.clip.clamp_min(1.0)
        self._grid = self._between(self.clip, layer.stored)
        self._stays = not_pruned(self._weight)
        self._compact = torch.int8 if self._args.type == "int" else torch.float8_e4m3fn  # which has all codes of e2m1
        self._best: tuple[Tensor, Grid] | None = None
        self.reached = False
        self._trainable = parameter.requires_grad
        parameter.data = self._original.clone()
        parameter.requires_grad_(True)

    def release(self) -> None:
        """Give the module its own weight back."""
        self.parameter.requires_grad_(self._trainable)
        self.parameter.data = self._original

    @torch.no_grad()
    def write(self) -> None:
        """Write the rounded weight to the module's parameter."""
        values = self._oriented(self.parameter.data)
        for part in self._parts():
            codes = self._code(part)[0]
            step, zero = self._scales(part)
            if zero is not None:
                codes -= zero
            values[part] = codes.mul_(step).view(len(codes), -1)

    @torch.no_grad()
    def learn(self, gradient: Tensor, rate: float, clip_rate: float) -> None:
        """One step of signed descent, given the loss's gradient with respect to the weight that was written."""
        self.reached = True
        gradient = self._oriented(gradient)
        scale_slope = torch.zeros(self._grid.step.shape)
        zero_slope = torch.zeros(self._grid.step.shape)
        for part in self._parts():
            codes, place, ratio = self._code(part)
            slope = gradient[part].float().view(codes.shape)
            # As the derivative of a clamp: zero outside, full on its edge.
            inside = (place.round() == codes) if self._args.type == "int" else place.abs() <= largest_code(self._args)
            descent = slope.sign().mul_(self._scales(part)[0].sign())
            if self._stays is not None:
                descent *= self._grouped(self._stays[part])
            self._grouped(self.offset[part]).addcmul_(descent, inside, value=-rate)
            if not clip_rate:
                continue
            zero = self._scales(part)[1]
            if zero is not None:
                zero_slope[part] = (slope * ~inside).sum(-1)
                codes -= zero
            scale_slope[part] = codes.addcmul_(ratio, inside, value=-1).mul_(slope).sum(-1)
        if clip_rate:
            self._move_clip(scale_slope, zero_slope, clip_rate)

    def keep(self) -> None:
        """Save the current codes and scales; :meth:`result` returns those saved last."""
        codes = torch.cat([self._code(part)[0].to(self._compact).flatten(1) for part in self._parts()])
        self._best = codes, self._grid

    def result(self, notes: list[str]) -> QuantizedWeight:
        """The saved weight, or the weight rounded to nearest if nothing was learned."""
        if self._best is None or not self.reached:
            self._start = None
            grid = self._between(torch.ones_like(self.clip), self._layer.stored)
            return QuantizedWeight(grid.round(self._weight.float()), grid, notes)
        codes, grid = self._best
        grouped = self._grouped(codes.float())
        if grid.zero is not None:
            grouped -= grid.zero.unsqueeze(-1)
        return QuantizedWeight(grouped.mul_(grid.step.unsqueeze(-1)).flatten(1), grid, notes)

    def _code(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Codes of some rows ``[rows, groups, width]``, their unrounded values, and the weight in steps."""
        step, zero = self._scales(part)
        ratio = self._grouped(self._weight[part].float()) / step
        offset = self._grouped(self.offset[part])
        place = ratio + (offset if self._args.type == "int" else offset * spacing(ratio, self._args))
        if zero is not None:
            place += zero
        return round_codes(place, self._args), place, ratio

    def _move_clip(self, scale_slope: Tensor, zero_slope: Tensor, rate: float) -> None:
        """Descend on the range factors; the slopes are the loss's sums over each row's groups."""
        if self._args.symmetric:
            slopes = [self._by_scale(scale_slope * self._grid.step.sign())]
        else:
            step, most = self._grid.step, 2**self._args.num_bits - 1
            low, high = self._low.clamp_max(0), self._high.clamp_min(0)
            # A clipped code stands for s * (its limit - z), and z = round(-low * c / s) moves with either end.
            zero_slope = zero_slope * -step
            shift = low * self.clip[1] / step**2
            slopes = [
                (scale_slope + zero_slope * shift) * high / most,
                (scale_slope + zero_slope * shift) * -low / most - zero_slope * low / step,
            ]
        for clip, highest, slope in zip(self.clip, self._highest, slopes, strict=True):
            clip.sub_(slope.sign(), alpha=rate).clamp_min_(self._least).clamp_max_(highest)
        self._grid = self._between(self.clip, self._layer.stored)

    def _by_scale(self, slopes: Tensor) -> Tensor:
        """Sum over the rows that share a scale."""
        if self._args.strategy != "block":
            return slopes
        assert self._args.block_structure is not None
        height = self._args.block_structure[0]
        padded = torch.nn.functional.pad(slopes, (0, 0, 0, -len(slopes) % height))
        return padded.view(-1, height, slopes.shape[1]).sum(1)

    def _between(self, clip: Tensor, stored: torch.dtype) -> Grid:
        low, high = self._low * clip[-1], self._high * clip[0]
        if self._start is not None:  # the min-max scale at a factor of 1, with the sign that was found
            widest = torch.maximum(self._high, -self._low) / (largest_code(self._args) + 0.5)
            scale = (widest * clip[0]).copysign(self._start).to(stored)
            scale = torch.where(scale == 0, torch.finfo(stored).tiny, scale)
            return Grid.of_scale(self._args, scale, None, self._weight.shape, self._width)
        return Grid.between(low, high, self._args, stored, self._weight.shape, self._width, self._global)

    def _scales(self, part: slice) -> tuple[Tensor, Tensor | None]:
        zero = self._grid.zero
        return self._grid.step[part].unsqueeze(-1), None if zero is None else zero[part].unsqueeze(-1)

    def _grouped(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), -1, self._width)

    def _oriented(self, weight: Tensor) -> Tensor:
        return weight.T if self._layer.transposed else weight

    def _parts(self) -> Iterator[slice]:
        rows, columns = self._weight.shape
        height = max(1, _CHUNK // columns)
        return (slice(start, start + height) for start in range(0, rows, height))
