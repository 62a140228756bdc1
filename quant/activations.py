"""Activation quantization as the runtime will do it, simulated while calibrating and evaluating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    calculate_range,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .layer_stats import LayerStats

# Shares of the widest range that are tried for static scales.
_SHARES = tuple(0.88**power for power in range(1, 21))


@dataclass(frozen=True)
class ActivationRounding:
    """How an activation is rounded: the number format, and the static scales from calibration, if any.

    Attributes:
        args: the number format.
        scale: ``[1]``, or ``[heads, 1, 1]`` for keys and values head by head; None where it is dynamic.
        zero: the code that stands for 0.0, as int8; None when symmetric.
        global_scale: NVFP4's one float32 per tensor.
    """

    args: QuantizationArgs
    scale: Tensor | None = None
    zero: Tensor | None = None
    global_scale: Tensor | None = None

    @classmethod
    def observed(cls, args: QuantizationArgs, low: Tensor, high: Tensor, stored: torch.dtype) -> ActivationRounding:
        """The rounding for the ranges observed in calibration.

        Args:
            args: the number format.
            low, high: the extremes: one value each, or ``[heads, 1, 1]``.
            stored: the dtype that scales are stored in.
        """
        if args.dynamic is True:
            return cls(args)
        if args.strategy == "tensor_group":
            return cls(args, global_scale=generate_gparam(low.float().amin(), high.float().amax()).reshape(1))
        low, high = low.float().clamp_max(0), high.float().clamp_min(0)
        scale, zero = calculate_qparams(low, high, args)
        scale = scale.to(stored)
        scale = torch.where(scale == 0, torch.finfo(stored).tiny, scale)  # only zeros were observed
        shape = (1,) if args.strategy == "tensor" else scale.shape
        return cls(args, scale.reshape(shape), None if args.symmetric else zero.to(torch.int8).reshape(shape))

    @classmethod
    def fitted(
        cls, args: QuantizationArgs, stats: LayerStats, energy: Tensor, stored: torch.dtype
    ) -> ActivationRounding:
        """The rounding of a layer's inputs that changes its outputs least, with columns weighted by ``energy``.

        Clipping a few large inputs gives all others finer steps. Integers with one scale for all inputs have this
        choice; others get what :meth:`observed` gives.

        Args:
            args: the number format.
            stats: of the inputs.
            energy: ``[columns]``: the sum of squares of what the layer multiplies each input by.
            stored: the dtype that scales are stored in.
        """
        low, high = stats.low.amin(), stats.high.amax()
        widest = cls.observed(args, low, high, stored)
        if args.type != "int" or widest.scale is None or stats.tokens == 0:
            return widest
        rows, use = stats.rows.float(), energy.float()

        def loss(candidate: ActivationRounding) -> Tensor:
            # Each channel's extremes occur at least once among all tokens, if not in the sample.
            ends = torch.stack([stats.low, stats.high]).float()
            apart, rare = (candidate(x) - x for x in (rows, ends))
            return (apart.square().mean(0) @ use) + (rare.square().sum(0) @ use) / stats.tokens

        candidates = [widest, *(cls.observed(args, low * share, high * share, stored) for share in _SHARES)]
        return min(candidates, key=lambda candidate: float(loss(candidate)))

    @classmethod
    def stored_as(
        cls, args: QuantizationArgs, tensors: Mapping[str, Tensor], name: str = "input"
    ) -> ActivationRounding:
        """The rounding that a checkpoint's tensors describe, such as ``input_scale`` or ``k_scale``.

        Raises:
            ValueError: a scale that the format needs is missing.
        """
        if args.dynamic is True:
            return cls(args)
        wanted = f"{name}_global_scale" if args.strategy == "tensor_group" else f"{name}_scale"
        if wanted not in tensors:
            raise ValueError(f"its {wanted} is missing")
        if args.strategy == "tensor_group":
            return cls(args, global_scale=tensors[wanted])
        return cls(args, tensors[wanted], None if args.symmetric else tensors[f"{name}_zero_point"])

    def stored(self, name: str = "input") -> dict[str, Tensor]:
        """The tensors that a checkpoint stores for it."""
        kinds = {"scale": self.scale, "zero_point": self.zero, "global_scale": self.global_scale}
        return {f"{name}_{kind}": tensor for kind, tensor in kinds.items() if tensor is not None}

    @torch.no_grad()
    def __call__(self, values: Tensor) -> Tensor:
        """``values`` after quantization and back, by compressed-tensors' own arithmetic."""
        if values.numel() == 0:
            return values
        if self.scale is not None:
            scale = self.scale.to(values.dtype)
            return fake_quantize(x=values, scale=scale, zero_point=cast(Tensor, self.zero), args=self.args)
        # compressed-tensors reads "per token" as one scale per element of the first two dimensions.
        batched = values if values.dim() > 2 else values.unsqueeze(0)
        scale, zero = compute_dynamic_scales_and_zp(
            value=batched, args=self.args, module=nn.Module(), global_scale=self.global_scale
        )
        rounded = fake_quantize(x=batched, scale=scale, zero_point=zero, args=self.args, global_scale=self.global_scale)
        return rounded.view_as(values)

    def within(self, values: Tensor) -> Tensor | None:
        """Which values are in the range of static scales; None where scales follow the values."""
        if self.scale is None:
            return None
        least, most = calculate_range(self.args, str(values.device))
        codes = values / self.scale.to(values.dtype) + (0 if self.zero is None else self.zero.to(values.dtype))
        codes = codes.round()
        return (codes >= least) & (codes <= most)


def quantize_inputs(module: nn.Module, rounding: ActivationRounding) -> RemovableHandle:
    """Round the inputs of ``module``. Gradients pass straight through the rounding, but for those that static scales clip.

    Returns:
        The hook's handle; ``remove()`` restores full-precision inputs.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (straight_through(inputs[0], rounding), *inputs[1:])

    return module.register_forward_pre_hook(hook)


def straight_through(values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """``values`` rounded, with a straight-through gradient where they are in its range."""
    return _StraightThrough.apply(values, rounding)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    """Rounding with the derivative of the identity, and of a constant where it clips."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        asked = ctx.needs_input_grad[0] and isinstance(rounding, ActivationRounding)
        within = rounding.within(inputs) if asked else None  # pyright: ignore[reportFunctionMemberAccess]
        ctx.save_for_backward(*(() if within is None else (within,)))
        return rounding(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = ctx.saved_tensors
        return gradients[0] * kept[0] if kept else gradients[0], None


def rounded_inputs(inputs: Tensor, args: QuantizationArgs) -> Tensor:
    """``inputs`` after dynamic quantization and back."""
    return ActivationRounding(args)(inputs)


def is_int8_by_token(args: QuantizationArgs) -> bool:
    """Whether inputs are rounded to int8 with one scale for each token: what integer kernels compute."""
    return (
        args.num_bits == 8
        and args.type == "int"
        and args.symmetric is True
        and args.strategy == "token"
        and args.dynamic is True
    )
