"""Gradients through rounded activations."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from smelt.quant.activations import ActivationRounding, straight_through


def test_what_static_scales_clip_has_no_gradient() -> None:
    """As with LSQ: a clipped value may grow without any change. Scales that follow the values clip nothing."""
    values = torch.tensor([0.5, 1.27, 5.0, -1.28, -9.0], requires_grad=True)
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor")
    straight_through(values, ActivationRounding(args, torch.tensor([0.01]))).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 0, 1, 0]
    shifted = torch.tensor([-0.5, 2.4, 2.7], requires_grad=True)
    uneven = QuantizationArgs(num_bits=8, type="int", symmetric=False, strategy="tensor")
    zero = torch.tensor([-128], dtype=torch.int8)
    straight_through(shifted, ActivationRounding(uneven, torch.tensor([0.01]), zero)).sum().backward()
    assert shifted.grad is not None
    assert shifted.grad.tolist() == [0, 1, 0]
    moving = torch.tensor([[0.5, 9.0]], requires_grad=True)
    by_token = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    straight_through(moving, ActivationRounding(by_token)).sum().backward()
    assert moving.grad is not None
    assert moving.grad.tolist() == [[1, 1]]
