"""Activation quantization as the runtime will do it, simulated while calibrating and evaluating."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def quantize_inputs(module: nn.Module, args: QuantizationArgs) -> RemovableHandle:
    """Make ``module`` see its input rounded as ``args`` say, with scales computed on the fly.

    Gradients pass straight through the rounding.

    Returns:
        The hook's handle; ``remove()`` restores full-precision inputs.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_StraightThrough.apply(inputs[0], args), *inputs[1:])

    return module.register_forward_pre_hook(hook)


@torch.no_grad()
def rounded_inputs(inputs: Tensor, args: QuantizationArgs) -> Tensor:
    """``inputs`` after dynamic quantization and back, by compressed-tensors' own arithmetic."""
    if inputs.numel() == 0:
        return inputs
    # compressed-tensors reads "per token" as one scale per element of the first two dimensions.
    batched = inputs if inputs.dim() > 2 else inputs.unsqueeze(0)
    scale, zero = compute_dynamic_scales_and_zp(value=batched, args=args, module=nn.Module())
    return fake_quantize(x=batched, scale=scale, zero_point=zero, args=args).view_as(inputs)


class _StraightThrough(torch.autograd.Function):
    """:func:`rounded_inputs`, with the derivative of the identity."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, args: QuantizationArgs) -> Tensor:
        return rounded_inputs(inputs, args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def is_int8_by_token(args: QuantizationArgs) -> bool:
    """Whether inputs are rounded to int8 with one scale for each token: what integer kernels compute."""
    return args.num_bits == 8 and args.type == "int" and args.symmetric is True and args.strategy == "token"
