"""A decoder's parts on the compiled kernels, in bfloat16; what they do not know is left to torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..keys_values import PagedKeysValues
from ..linear import Linear, restored_from
from ..matrix import Matrix
from ..operators import Attention, Heads, Operators, Rotation, Rowwise
from .library import processor_features
from .linears import CodesLinear, NativeDenseLinear

_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1}
_LARGEST_HEAD = 512  # attention_runs.cpp packs 16 positions of a head at a time in its own memory
_KINDS = {torch.bfloat16: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


class NativeOperators(Operators):
    """Like :class:`Operators`, in bfloat16 only.

    Args:
        kernels: the compiled module.
        exact: whether weight-only formats keep their inputs in bfloat16 for any number of rows.
    """

    def __init__(self, kernels: ModuleType, exact: bool) -> None:
        super().__init__(torch.bfloat16)
        self._kernels = kernels
        self._exact = exact

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        if matrix.scale is not None and matrix.inputs is not None and "amx_int8" in processor_features():
            return super().linear(matrix, bias)  # oneDNN uses matrix tiles there
        if CodesLinear.takes(matrix):
            return CodesLinear(self._kernels, matrix, bias, self._exact)
        if matrix.inputs is None:
            weight = matrix.dense(torch.bfloat16)
            return NativeDenseLinear(self._kernels, weight, bias, restored_from(matrix, torch.bfloat16))
        return super().linear(matrix, bias)

    def rms_norm(self, weight: Tensor, eps: float, rounds_first: bool) -> Rowwise:
        return _RmsNorm(self._kernels, weight, eps, rounds_first)

    def gate(self, activation: str) -> Rowwise:
        if activation not in _ACTIVATIONS:
            return super().gate(activation)
        number, kernel = _ACTIVATIONS[activation], self._kernels.gate

        def gated(hidden: Tensor) -> Tensor:
            rows, size = hidden.shape[0], hidden.shape[1] // 2
            out = torch.empty(rows, size, dtype=torch.bfloat16)
            kernel(number, hidden.data_ptr(), rows, size, out.data_ptr(), torch.get_num_threads())
            return out

        return gated

    def attention(self, heads: Heads) -> Attention:
        if heads.size > _LARGEST_HEAD:
            return super().attention(heads)
        return _NativeAttention(self._kernels, heads)


class _RmsNorm:
    def __init__(self, kernels: ModuleType, weight: Tensor, eps: float, rounds_first: bool) -> None:
        # A weight that multiplies a rounded quotient is itself of the computing type.
        self._weight = (weight.to(torch.bfloat16).float() if rounds_first else weight).contiguous()
        self._kernel = kernels.rms_norm
        self._handle = kernels.Norm(self._weight.data_ptr(), weight.numel(), eps, rounds_first)

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        size = hidden.shape[-1]
        self._kernel(
            self._handle,
            hidden.data_ptr(),
            size,
            out.data_ptr(),
            size,
            hidden.numel() // size,
            1,
            torch.get_num_threads(),
        )
        return out


class _NativeAttention:
    def __init__(self, kernels: ModuleType, heads: Heads) -> None:
        self._kernels = kernels
        self._heads = heads

    def __call__(
        self, projected: Tensor, rotation: Rotation | None, store: PagedKeysValues, layer: int, batch: Batch
    ) -> Tensor:
        heads, threads = self._heads, torch.get_num_threads()
        tokens, width = projected.shape
        projected = projected.contiguous()
        cache = self._handle(store, layer)
        cosine, sine = (None, None) if rotation is None else rotation
        self._kernels.rotate_and_store(
            cache,
            projected.data_ptr(),
            tokens,
            heads.queries,
            0 if cosine is None else cosine.data_ptr(),
            0 if sine is None else sine.data_ptr(),
            0 if cosine is None else cosine.shape[-1],
            batch.slots.data_ptr(),
            threads,
        )
        out = torch.empty(tokens, heads.queries * heads.size, dtype=torch.bfloat16)
        singles = batch.singles
        if singles is not None:
            self._kernels.attend(
                cache,
                projected.data_ptr(),
                width,
                heads.queries,
                out.data_ptr(),
                singles.rows.data_ptr(),
                singles.tables.data_ptr(),
                singles.stops.data_ptr(),
                len(singles.rows),
                singles.tables.shape[1],
                heads.scale,
                heads.cap or 0.0,
                heads.window or 0,
                threads,
            )
        for i in batch.longer:
            first = batch.starts[i]
            self._kernels.attend_run(
                cache,
                projected[first].data_ptr(),
                width,
                heads.queries,
                out[first].data_ptr(),
                batch.tables[i].data_ptr(),
                len(batch.runs[i].tokens),
                batch.runs[i].start,
                heads.scale,
                heads.cap or 0.0,
                heads.window or 0,
                threads,
            )
        return out

    def _handle(self, store: PagedKeysValues, layer: int) -> Any:
        """The kernels' view of one layer of the cache, made once."""
        found = store.handles.get(layer)
        if found is None:
            parts = store.layer(layer)
            found = store.handles[layer] = self._kernels.Cache(
                keys=parts.keys.data_ptr(),
                values=parts.values.data_ptr(),
                key_scales=0 if parts.key_scales is None else parts.key_scales.data_ptr(),
                value_scales=0 if parts.value_scales is None else parts.value_scales.data_ptr(),
                heads=self._heads.shared,
                size=self._heads.size,
                block=store.block_size,
                kind=_KINDS[parts.keys.dtype],
            )
        return found
