"""A random layer and inputs of its columns, which differ in size."""

from __future__ import annotations

import torch
from torch import Tensor


def random_layer() -> tuple[Tensor, Tensor]:
    """Its weight ``[rows, columns]`` and its inputs ``[tokens, columns]``."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(96, 96, generator=generator) / 96**0.5
    inputs = torch.randn(2000, 96, generator=generator) @ mix * torch.exp(torch.randn(96, generator=generator))
    return torch.randn(40, 96, generator=generator), inputs
