"""A linear that keeps its weight in the checkpoint's format, for training an adapter on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..scheme import Scheme
from ..stored.compressed_tensors import restore


class FrozenLinear(nn.Linear):
    """Restores its weight for each forward and backward pass, then drops it; gradients reach its inputs.

    Between passes it takes the memory of the stored tensors. Its ``weight`` can be read, but not changed.

    Args:
        stored: the tensors that compressed-tensors stores for the weight, by local name.
        scheme: their scheme.
        shape: rows and columns of the weight.
        bias: the bias, if there is one.
        dtype: of the restored weight.
    """

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        scheme: Scheme,
        shape: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self._scheme = scheme
        self._dtype = dtype
        self._names = tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(f"stored_{name}", tensor, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @torch.no_grad()
    def restored(self) -> Tensor:
        """The weight, ``[rows, columns]``; restored by each call."""
        parts = {name: self.get_buffer(f"stored_{name}") for name in self._names}
        return restore(parts, self._scheme).to(self._dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight, read-only."""
        return self.restored().as_subclass(_ReadOnly)

    def forward(self, input: Tensor) -> Tensor:
        """The product with the restored weight."""
        product = _Product.apply(input, self)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """A product whose weight is not kept for the backward pass, but restored again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, inputs.dtype
        return functional.linear(inputs, layer.restored().to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return (gradient @ ctx.layer.restored().to(gradient.dtype)).to(ctx.dtype), None


class _ReadOnly(Tensor):
    """A weight whose ``data`` would be a copy: writing to it raises an error, because it would have no effect."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("the weight is quantized and cannot be changed in place; merge with `smelt merge`")

    @data.setter
    def data(self, _: Any) -> NoReturn:
        raise RuntimeError("the weight is quantized and cannot be changed in place; merge with `smelt merge`")
