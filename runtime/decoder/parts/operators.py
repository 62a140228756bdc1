"""The operators of a decoder: plain torch here, replaced part by part by faster kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from ....system.hardware.pages import weights_are_elsewhere
from ...cache_types import OperatorsName
from ...fusions import Fusions
from ...heads import Heads
from ...sampling.draw import Draw, RankedToken, draw_tokens
from ...sampling.logit_statistics import LogitStatistics, logit_statistics
from ...weights.matrix import Matrix
from ..linears.cpu import Int8Linear
from ..linears.linear import DenseLinear, Linear
from .attention import attend
from .batch import Batch
from .draft_inputs import AuxStates
from .kv_cache import KeysValues, PagedKeysValues, Rules
from .rope import rotate

Rowwise = Callable[[Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]
ExecutorName = Literal["torch", "gpu"]


class Attention(Protocol):
    """Stores a step's keys and values, and attends."""

    def __call__(
        self, projected: Tensor, rotation: Rotation | None, store: KeysValues, layer: int, batch: Batch
    ) -> Tensor:
        """From ``[tokens, (queries + 2 shared) x size]``, which may be overwritten, to ``[tokens, queries x size]``.

        Args:
            projected: queries, keys and values.
            rotation: cosines and sines ``[tokens, 1, rotated / 2]``; None if positions are not rotated.
            store: the cache.
            layer: which layer's.
            batch: whose tokens these are.
        """
        ...


class FeedForward(Protocol):
    """The feed-forward part of a layer."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        ...

    def linears(self) -> dict[str, Linear]:
        """Its linears, by role."""
        ...


@dataclass(frozen=True)
class LayerParts:
    """The parts of a layer.

    Attributes:
        query_key_value, out: of attention; None if it has none.
        feed_forward: None if it has none.
        order: how its parts are put together (see DecoderSpec).
        norms: ``before_attention``, ``query_norm``, ``key_norm``, ``after_attention``, ``before_mlp`` and ``after_mlp``;
            None for missing ones.
        whole_heads: whether query and key norms, if any, apply to all heads together.
        activation: of the feed-forward part.
        rope: the name of its rotation; None if positions are not rotated.
    """

    order: str
    norms: dict[str, Rowwise | None]
    query_key_value: Linear | None
    out: Linear | None
    feed_forward: FeedForward | None
    heads: Heads
    whole_heads: bool
    activation: str
    rope: str | None


class Experts(Protocol):
    """The feed-forward parts of all experts at once."""

    def __call__(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """``hidden [tokens, hidden]`` through each token's ``chosen`` experts, summed with the weights ``shares``."""
        ...

    def linears(self) -> dict[str, Linear]:
        """Each expert's parts, by role."""
        ...


class Stack(Protocol):
    """All layers at once, for some kinds of steps."""

    def takes(self, batch: Batch, store: KeysValues) -> bool:
        """Whether it can compute this step."""
        ...

    def __call__(
        self,
        hidden: Tensor,
        rotations: dict[str, Rotation],
        store: KeysValues,
        batch: Batch,
        aux: AuxStates | None = None,
    ) -> Tensor:
        """From embeddings ``[tokens, hidden]``, which may be overwritten, to the last layer's outputs; ``aux`` takes states between layers."""
        ...


class RunLayers(Protocol):
    """All layers, one part after another."""

    def __call__(self, hidden: Tensor, rotations: dict[str, Rotation], store: KeysValues, batch: Batch) -> Tensor:
        """From embeddings ``[tokens, hidden]`` to the last layer's outputs."""
        ...


class Operators:
    """The parts of a decoder in plain torch, for any device and dtype.

    Args:
        dtype: what is computed in.
        device: where.

    Attributes:
        name: their name in the table of cache dtypes.
        executor: the executor of their steps.
        fusions: the fused launches; None for operators without Smelt's GPU kernels.
        block_multiple: the divisor that a cache block's number of positions must have.
        takes_adapters: whether LoRA adapters can be applied beside its linears.
        same_rows: up to how many rows in a step the results of each do not depend on how many there are, of the linears made so
            far; None if any number has the same, or if nothing is known of it.
    """

    name: OperatorsName = "torch"
    executor: ExecutorName = "torch"
    fusions: Fusions | None = None
    block_multiple = 1
    takes_adapters = True
    same_rows: int | None = None

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.dtype = dtype
        self.device = device or torch.device("cpu")

    def linear(self, matrix: Matrix, bias: Tensor | None) -> Linear:
        """The fastest available linear for ``matrix``."""
        # oneDNN packs weights into memory of its own.
        if self.device.type == "cpu" and not weights_are_elsewhere() and Int8Linear.takes(matrix, self.dtype):
            return Int8Linear(matrix, bias, self.dtype)
        return DenseLinear(matrix, bias, self.dtype, self.device)

    def gated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        """Stacked gate and up matrices as one linear that returns their activated product; None if unsupported."""
        return None

    def activated(self, matrix: Matrix, bias: Tensor | None, activation: str) -> Linear | None:
        """A linear with a fused activation; None if unsupported."""
        return None

    def router(self, weight: Tensor) -> Rowwise:
        """The router, which scores experts for each token, with a weight ``[experts, hidden]``."""
        return lambda hidden: functional.linear(hidden, weight)

    def mixture(self, forward: FeedForward) -> FeedForward:
        """A mixture of experts."""
        return forward

    def groups_experts(self, activation: str) -> bool:
        """Whether :meth:`experts` justifies loading all experts' weights at once."""
        return False

    def experts(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], activation: str) -> Experts | None:
        """All experts' feed-forward parts together; None if one after another is as fast."""
        return None

    def upper(self) -> Operators | None:
        """Operators for a second model of the same checkpoint, made of the upper four of 8 bits of the first one's weights, in the
        same memory; None if no weights stand so that they can be read alone.
        """
        return None

    def rms_norm(self, weight: Tensor, eps: float, rounds_first: bool) -> Rowwise:
        """Divide by the root mean square of the last dimension, and multiply by a float32 weight.

        Args:
            weight: of float32.
            eps: added to the mean square.
            rounds_first: whether the quotient is rounded to the compute dtype before it is multiplied.
        """
        if rounds_first:
            narrow = weight.to(self.dtype)
            return lambda hidden: narrow * _normed(hidden, eps).to(hidden.dtype)
        return lambda hidden: (_normed(hidden, eps) * weight).to(hidden.dtype)

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> Rowwise:
        """Subtract the mean, divide by the standard deviation, multiply by the weight, add the bias."""
        return lambda hidden: functional.layer_norm(hidden, (hidden.shape[-1],), weight, bias, eps)

    def gate(self, activation: str) -> Rowwise:
        """The first half of the last dimension, activated, times the second."""
        activate: Rowwise = ACT2FN[activation]

        def gated(hidden: Tensor) -> Tensor:
            gate, up = hidden.chunk(2, dim=-1)
            return activate(gate) * up

        return gated

    def attention(self, heads: Heads) -> Attention:
        """Attention over the paged cache."""
        return _TorchAttention(heads)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum of two tensors of one shape."""
        return a + b

    def to_float32(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """In float32; written to ``out``, if there is one."""
        return values.float() if out is None else out.copy_(values)

    def logit_statistics(self, logits: Tensor) -> LogitStatistics:
        """Statistics of rows of logits, for choosing tokens."""
        return logit_statistics(logits)

    def draw_tokens(self, draws: Sequence[Draw]) -> list[list[RankedToken]]:
        """Rank the tokens of rows of logits, the chosen one first; none where logits are not sound or nothing is allowed."""
        return draw_tokens(draws)

    def stack(self, layers: list[LayerParts], reach: Callable[[int], None] | None = None) -> Stack | None:
        """All layers at once, where that is faster for some steps.

        Args:
            layers: the layers' parts.
            reach: must be called before each layer, with its number; None if nothing must be.
        """
        return None

    def lower(self, run: RunLayers) -> RunLayers | None:
        """The layers in the form that is run where no :meth:`stack` takes a step; None for the form that they have."""
        return None

    def explain_layers(self) -> str | None:
        """A description of the layers besides their linears; None if there is none."""
        return None

    def keys_values(
        self,
        heads: Sequence[int],
        size: int,
        blocks: int,
        block_size: int,
        kept: torch.dtype,
        rules: Rules | None = None,
    ) -> KeysValues:
        """An empty cache in these operators' layout; arguments as of :class:`PagedKeysValues`."""
        return PagedKeysValues(heads, size, blocks, block_size, kept, self.device, rules)

    def keeps(self, codes: torch.dtype) -> bool:
        """Whether the cache can store the codes to which the checkpoint rounds keys and values."""
        return True

    def block_bytes(self, heads: Sequence[int], size: int, block_size: int, kept: torch.dtype) -> int:
        """Memory of one of the cache's blocks, over all layers."""
        return PagedKeysValues.block_bytes(heads, size, block_size, kept)


class _TorchAttention:
    def __init__(self, heads: Heads) -> None:
        self._heads = heads

    def __call__(
        self, projected: Tensor, rotation: Rotation | None, store: KeysValues, layer: int, batch: Batch
    ) -> Tensor:
        heads = self._heads
        queries = stored_by_torch(projected, rotation, store, layer, batch, heads)
        return attend(queries, store, layer, heads.scale, heads.window, heads.cap, batch).flatten(1)


def stored_by_torch(
    projected: Tensor, rotation: Rotation | None, store: KeysValues, layer: int, batch: Batch, heads: Heads
) -> Tensor:
    """Rotate queries and keys and store keys and values, in plain torch; returns queries ``[tokens, heads, size]``."""
    widths = [heads.queries, heads.shared, heads.shared]
    queries, keys, values = projected.unflatten(-1, (-1, heads.size)).split(widths, dim=1)
    if rotation is not None:
        queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
    store.write(layer, batch.slots, keys, values)
    if batch.also is not None:
        rows, slots = batch.also
        store.write(layer, slots, keys[rows], values[rows])
    return queries


def _normed(hidden: Tensor, eps: float) -> Tensor:
    wide = hidden.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
