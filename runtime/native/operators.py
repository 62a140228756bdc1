"""A decoder's parts on the compiled kernels, in bfloat16; unsupported parts are left to torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..decoder.linears.linear import Linear, restored_from
from ..decoder.parts.batch import Batch
from ..decoder.parts.kv_cache import KeysValues
from ..decoder.parts.operators import Attention, LayerParts, Operators, Rotation, Rowwise, Stack, stored_by_torch
from ..heads import Heads
from ..sampling.draw import Draw, RankedToken
from ..sampling.logit_statistics import LogitStatistics
from ..weights.matrix import Matrix
from .cache import LARGEST_HEAD, also_addresses, layer_handle, stores
from .linears import CodesLinear, NativeDenseLinear
from .rows import ACTIVATIONS, NativeGate, NativeRmsNorm
from .stack import stack_of


class NativeOperators(Operators):
    """Like :class:`Operators`, in bfloat16 only.

    Args:
        kernels: the compiled module.
        exact: whether inputs of weight-only formats keep 16 bits for any number of rows.
        few_exact: whether they do for one row or two, where that costs little.
    """

    name = "native"

    def __init__(self, kernels: ModuleType, exact: bool, *, few_exact: bool = True) -> None:
        super().__init__(torch.bfloat16)
        self._kernels = kernels
        self._exact, self._few_exact = exact, few_exact

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        if CodesLinear.takes(matrix):
            return CodesLinear(self._kernels, matrix, bias, self._exact, few_exact=self._few_exact)
        if matrix.inputs is None:
            weight = matrix.dense(torch.bfloat16)
            dense = NativeDenseLinear(self._kernels, weight, bias, restored_from(matrix, torch.bfloat16))
            self.same_rows = dense.same_rows
            return dense
        return super().linear(matrix, bias)

    def rms_norm(self, weight: Tensor, eps: float, rounds_first: bool) -> Rowwise:
        return NativeRmsNorm(self._kernels, weight, eps, rounds_first)

    def gate(self, activation: str) -> Rowwise:
        return NativeGate(self._kernels, activation) if activation in ACTIVATIONS else super().gate(activation)

    def attention(self, heads: Heads) -> Attention:
        if heads.size > LARGEST_HEAD:
            return super().attention(heads)
        return NativeAttention(self._kernels, heads)

    # torch's threads wait for each other, and so for one whose core another process uses: only for that these two are here.
    def add(self, a: Tensor, b: Tensor) -> Tensor:
        if not (
            a.dtype == b.dtype == torch.bfloat16 and a.shape == b.shape and a.is_contiguous() and b.is_contiguous()
        ):
            return super().add(a, b)
        out = torch.empty_like(a)
        self._kernels.add(a.data_ptr(), b.data_ptr(), a.numel(), out.data_ptr(), torch.get_num_threads())
        return out

    def to_float32(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        if values.dtype != torch.bfloat16 or not values.is_contiguous() or not (out is None or out.is_contiguous()):
            return super().to_float32(values, out)
        out = torch.empty(values.shape, dtype=torch.float32) if out is None else out
        self._kernels.to_float32(values.data_ptr(), values.numel(), out.data_ptr(), torch.get_num_threads())
        return out

    def logit_statistics(self, logits: Tensor) -> LogitStatistics:
        logits = logits.contiguous()
        rows, size = logits.shape
        return LogitStatistics(*self._kernels.logit_statistics(logits.data_ptr(), rows, size, torch.get_num_threads()))

    def draw_tokens(self, draws: Sequence[Draw]) -> list[list[RankedToken]]:
        rows = [each.logits.contiguous() for each in draws]
        asked = [
            (row.data_ptr(), len(row), p.temperature, p.top_k, p.top_p, p.min_p, each.seed, each.length, each.ranks)
            for row, each, p in zip(rows, draws, (each.params for each in draws), strict=True)
        ]
        found = self._kernels.draw_tokens(asked, torch.get_num_threads())
        return [[RankedToken(*token) for token in ranked] for ranked in found]

    def stack(self, layers: list[LayerParts], reach: Callable[[int], None] | None = None) -> Stack | None:
        return stack_of(self._kernels, layers) if reach is None else None


class NativeAttention:
    """Attention of one layer.

    Args:
        kernels: the compiled module.
        heads: the layer's.
        each_alone: whether the tokens of a prompt attend like single tokens, so that results do not depend on how the
            prompt is chunked.

    Attributes:
        tiles: whether prompts attend on AMX tiles, or their emulation, where heads have a multiple of 32 numbers.
    """

    def __init__(self, kernels: ModuleType, heads: Heads, *, each_alone: bool = False) -> None:
        self._kernels = kernels
        self._heads = heads
        self._each_alone = each_alone
        self.tiles: bool = kernels.dense_tiles_are_used()

    def __call__(
        self, projected: Tensor, rotation: Rotation | None, store: KeysValues, layer: int, batch: Batch
    ) -> Tensor:
        heads, threads = self._heads, torch.get_num_threads()
        tokens, width = projected.shape
        projected = projected.contiguous()
        cache = layer_handle(self._kernels, store, layer, heads)
        cosine, sine = (None, None) if rotation is None else rotation
        if stores(store):
            self._kernels.rotate_and_store(
                cache,
                projected.data_ptr(),
                tokens,
                heads.queries,
                0 if cosine is None else cosine.data_ptr(),
                0 if sine is None else sine.data_ptr(),
                0 if cosine is None else cosine.shape[-1],
                batch.slots.data_ptr(),
                *also_addresses(batch),
                threads,
            )
        else:
            projected = stored_by_torch(projected, rotation, store, layer, batch, heads).flatten(1).contiguous()
            width = projected.shape[1]
        out = torch.empty(tokens, heads.queries * heads.size, dtype=torch.bfloat16)
        singles, longer = (batch.each_alone, []) if self._each_alone else (batch.decoding, batch.prompts)
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
        for i in longer:
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
                self.tiles,
                threads,
            )
        return out
