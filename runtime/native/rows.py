"""Row-wise operations of a layer on the compiled kernels."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

# The kernel's number of each activation, by transformers' names.
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1}


class NativeRmsNorm:
    """Root mean square norm of the last dimension.

    Attributes:
        handle: the kernels' handle.
    """

    def __init__(self, kernels: ModuleType, weight: Tensor, eps: float, rounds_first: bool) -> None:
        # A weight that multiplies a rounded quotient is in the compute dtype.
        self._weight = (weight.to(torch.bfloat16).float() if rounds_first else weight).contiguous()
        self._kernel = kernels.rms_norm
        self.handle = kernels.Norm(self._weight.data_ptr(), weight.numel(), eps, rounds_first)

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        size = hidden.shape[-1]
        rows, threads = hidden.numel() // size, torch.get_num_threads()
        self._kernel(self.handle, hidden.data_ptr(), size, out.data_ptr(), size, rows, 1, threads)
        return out


class NativeGate:
    """The first half of the last dimension, activated, times the second."""

    def __init__(self, kernels: ModuleType, activation: str) -> None:
        self._kernel = kernels.gate
        self._activation = ACTIVATIONS[activation]

    def __call__(self, hidden: Tensor) -> Tensor:
        rows, size = hidden.shape[0], hidden.shape[1] // 2
        hidden = hidden.contiguous()
        out = torch.empty(rows, size, dtype=torch.bfloat16)
        self._kernel(self._activation, hidden.data_ptr(), rows, size, out.data_ptr(), torch.get_num_threads())
        return out
