"""All layers of a decoder in one call, for steps without prompts: every sequence adds one token, or a draft of some."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..decoder.parts.batch import Batch
from ..decoder.parts.draft_inputs import AuxStates
from ..decoder.parts.feed_forward import GatedFeedForward
from ..decoder.parts.kv_cache import KeysValues
from ..decoder.parts.operators import LayerParts, Rotation
from .cache import LARGEST_HEAD, also_addresses, layer_handle, stores
from .linears import CodesLinear, NativeDenseLinear, dense_rows
from .rows import ACTIVATIONS, NativeRmsNorm


class NativeStack:
    """Layers that :func:`stack_of` found to be made of native parts only."""

    def __init__(self, kernels: ModuleType, layers: list[LayerParts], ropes: list[str]) -> None:
        self._kernels = kernels
        self._most = dense_rows(kernels)
        self._kept = layers
        self._ropes = ropes
        self._layers = kernels.Layers([_layer(kernels, parts, ropes) for parts in layers])
        # Here, as a cache outlives a model whose weights are replaced.
        self._caches: WeakKeyDictionary[KeysValues, object] = WeakKeyDictionary()

    def takes(self, batch: Batch, store: KeysValues) -> bool:
        """Whether a step is of this kind; for more rows torch's bfloat16 product is faster."""
        return not batch.prompts and len(batch.tokens) <= self._most and stores(store)

    def __call__(
        self,
        hidden: Tensor,
        rotations: dict[str, Rotation],
        store: KeysValues,
        batch: Batch,
        aux: AuxStates | None = None,
    ) -> Tensor:
        """From embeddings ``[tokens, hidden]``, which are overwritten, to the last layer's outputs."""
        singles = batch.decoding
        assert singles is not None
        hidden = hidden.contiguous()
        caches = self._caches.get(store)
        if caches is None:
            attending = [parts for parts in self._kept if parts.out is not None]
            each = [layer_handle(self._kernels, store, i, parts.heads) for i, parts in enumerate(attending)]
            caches = self._caches[store] = self._kernels.Caches(each)
        tables = [rotations[name] for name in self._ropes]
        self._kernels.decode(
            self._layers,
            caches,
            hidden.data_ptr(),
            hidden.shape[0],
            hidden.shape[1],
            [(cosine.data_ptr(), sine.data_ptr(), cosine.shape[-1]) for cosine, sine in tables],
            batch.slots.data_ptr(),
            *also_addresses(batch),
            singles.rows.data_ptr(),
            singles.tables.data_ptr(),
            singles.stops.data_ptr(),
            singles.tables.shape[1],
            *(([], 0) if aux is None else aux.addresses(len(self._kept))),
            torch.get_num_threads(),
        )
        return hidden


def stack_of(kernels: ModuleType, layers: list[LayerParts]) -> NativeStack | None:
    """The layers as a stack; None if any part of them is not native."""
    if not all(_is_native(parts) for parts in layers):
        return None
    ropes = sorted({parts.rope for parts in layers if parts.rope is not None})
    return NativeStack(kernels, layers, ropes)


def _is_native(parts: LayerParts) -> bool:
    forward = parts.feed_forward
    if parts.order != "sequential" or not (forward is None or isinstance(forward, GatedFeedForward)):
        return False
    gated = () if forward is None else (forward.gate_up, forward.down)
    linears = [linear for linear in (parts.query_key_value, parts.out, *gated) if linear is not None]
    return (
        all(
            isinstance(part, NativeDenseLinear) or (isinstance(part, CodesLinear) and part.reads_in_order)
            for part in linears
        )
        and all(norm is None or isinstance(norm, NativeRmsNorm) for norm in parts.norms.values())
        and parts.activation in ACTIVATIONS
        and parts.heads.size <= LARGEST_HEAD
    )


def _layer(kernels: ModuleType, parts: LayerParts, ropes: list[str]) -> object:
    heads, forward = parts.heads, parts.feed_forward
    assert forward is None or isinstance(forward, GatedFeedForward)
    return kernels.Layer(
        **{name: _handle(norm) for name, norm in parts.norms.items()},
        query_key_value=_handle(parts.query_key_value),
        out=_handle(parts.out),
        gate_up=None if forward is None else _handle(forward.gate_up),
        down=None if forward is None else _handle(forward.down),
        heads=heads.queries,
        window=heads.window or 0,
        scale=heads.scale,
        cap=heads.cap or 0.0,
        activation=ACTIVATIONS[parts.activation],
        rope=-1 if parts.rope is None else ropes.index(parts.rope),
    )


def _handle(part: Any) -> object:
    """The kernels' handle of a native part, if it has one."""
    return None if part is None else part.handle
