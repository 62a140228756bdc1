"""The tensors of a GGUF file, their names, and where each comes from in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gguf import MODEL_TENSOR, TENSOR_NAMES
from torch import Tensor

from ...runtime.decoder.architectures import DecoderSpec
from ...runtime.weights.checkpoint import Checkpoint
from ...runtime.weights.matrix import Matrix
from ...system.errors import RuntimeProblem
from .gguf_architectures import Architecture

_NORMS = {
    "before_attention": MODEL_TENSOR.ATTN_NORM,
    "after_attention": MODEL_TENSOR.ATTN_POST_NORM,
    "before_mlp": MODEL_TENSOR.FFN_NORM,
    "after_mlp": MODEL_TENSOR.FFN_POST_NORM,
}
_QUERY_KEY_VALUE = (MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_K, MODEL_TENSOR.ATTN_V)


@dataclass(frozen=True)
class Small:
    """A tensor that stays in float32: a norm, a bias, a router, frequencies, learned positions."""

    name: str
    dimensions: int
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class Large:
    """A weight, or the weights of all experts, which may be stored in few bits.

    Attributes:
        name: in the file.
        elements: how many values it has.
        load: one matrix, or one for each expert.
        stacked: whether it is all experts'.
        table: whether it is the embedding or lm_head.
        factored: whether a factor is stored with it, where it stays NVFP4.
    """

    name: str
    elements: int
    load: Callable[[], list[Matrix]]
    stacked: bool = False
    table: bool = False
    factored: bool = False


def tensors_of(checkpoint: Checkpoint, spec: DecoderSpec, architecture: Architecture) -> list[Small | Large]:
    """All tensors of the file; nothing is read yet.

    Raises:
        RuntimeProblem: the checkpoint lacks a tensor, or has one that llama.cpp does not support.
    """
    return list(_Walk(checkpoint, spec, architecture))


class _Walk:
    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec, architecture: Architecture) -> None:
        self._checkpoint, self._spec, self._architecture = checkpoint, spec, architecture

    def __iter__(self) -> Iterator[Small | Large]:
        names, spec = self._spec.names, self._spec
        yield self._table(MODEL_TENSOR.TOKEN_EMBD, names.embedding)
        if names.positions:
            positions = f"{names.positions}.weight"
            yield Small(_name(MODEL_TENSOR.POS_EMBD), 2, lambda: self._checkpoint.tensor(positions))
        yield from self._norm(names.final_norm, MODEL_TENSOR.OUTPUT_NORM)
        has_head = not spec.tied and self._checkpoint.has_matrix(names.head)
        if has_head:
            yield from self._linear(names.head, MODEL_TENSOR.OUTPUT, table=True)
        elif self._architecture.head == "always":
            yield self._table(MODEL_TENSOR.OUTPUT, names.embedding)
        for i in range(len(spec.layers)):
            yield from self._layer(i)

    def _layer(self, i: int) -> Iterator[Small | Large]:
        names, spec = self._spec.names, self._spec
        prefix = names.layer.format(i=i)
        for place, kind in _NORMS.items():
            at = getattr(names, place)
            yield from self._norm(None if at is None else prefix + at, kind, i)
        if spec.query_key_norm:
            yield from self._norm(prefix + names.query_norm, MODEL_TENSOR.ATTN_Q_NORM, i)
            yield from self._norm(prefix + names.key_norm, MODEL_TENSOR.ATTN_K_NORM, i)
        kinds = _QUERY_KEY_VALUE if len(names.query_key_value) == 3 else (MODEL_TENSOR.ATTN_QKV,)
        for kind, name in zip(kinds, names.query_key_value, strict=True):
            yield from self._linear(prefix + name, kind, i, rows=self._order(kind), biased=True)
        yield from self._linear(prefix + names.out, MODEL_TENSOR.ATTN_OUT, i)
        if spec.layers[i].sparse:
            yield from self._experts(prefix, i)
            return
        ups = (MODEL_TENSOR.FFN_GATE, MODEL_TENSOR.FFN_UP) if len(names.gate_up) == 2 else (MODEL_TENSOR.FFN_UP,)
        for kind, name in zip(ups, names.gate_up, strict=True):
            yield from self._linear(prefix + name, kind, i)
        yield from self._linear(prefix + names.down, MODEL_TENSOR.FFN_DOWN, i)

    def _experts(self, prefix: str, i: int) -> Iterator[Small | Large]:
        names, count = self._spec.names, self._spec.experts
        router = self._first([prefix + name for name in names.router])
        yield Small(_name(MODEL_TENSOR.FFN_GATE_INP, i), 2, lambda: self._checkpoint.tensor(f"{router}.weight"))
        gate_up = {prefix + gate.format(e=0): (gate, up) for gate, up in names.expert_gate_up}
        gate, up = gate_up[self._first(list(gate_up))]
        downs = {prefix + name.format(e=0): name for name in names.expert_down}
        down = downs[self._first(list(downs))]
        kinds = {MODEL_TENSOR.FFN_GATE_EXP: gate, MODEL_TENSOR.FFN_UP_EXP: up, MODEL_TENSOR.FFN_DOWN_EXP: down}
        for kind, name in kinds.items():
            all_names = [prefix + name.format(e=e) for e in range(count)]
            for one in all_names:
                self._refuse_bias(one)

            def load(all_names: list[str] = all_names) -> list[Matrix]:
                return [self._checkpoint.matrix(one) for one in all_names]

            factored = all(self._is_factored(one) for one in all_names)
            elements = sum(map(self._elements, all_names))
            yield Large(_name(kind, i), elements, load, stacked=True, factored=factored)

    def _linear(
        self,
        name: str,
        kind: MODEL_TENSOR,
        i: int | None = None,
        *,
        rows: Tensor | None = None,
        biased: bool = False,
        table: bool = False,
    ) -> Iterator[Small | Large]:
        if not self._checkpoint.has_matrix(name):
            raise RuntimeProblem(f"{self._checkpoint.path}: the checkpoint lacks {name}")

        def load() -> list[Matrix]:
            found = self._checkpoint.matrix(name)
            if self._spec.names.is_transposed(name):
                found = Matrix.plain(found.dense(self._checkpoint.dtype).T.contiguous(), found.inputs)
            return [found if rows is None else found.rows(rows)]

        factored = self._is_factored(name)
        yield Large(_name(kind, i), self._elements(name), load, table=table, factored=factored)
        if not self._checkpoint.has(f"{name}.bias"):
            return
        if not (biased or self._architecture.all_biases):
            self._refuse_bias(name)

        def bias() -> Tensor:
            found = self._checkpoint.tensor(f"{name}.bias")
            return found if rows is None else found[rows]

        yield Small(_name(kind, i, "bias"), 1, bias)

    def _norm(self, name: str | None, kind: MODEL_TENSOR, i: int | None = None) -> Iterator[Small]:
        if name is None:
            return
        offset = 1.0 if self._spec.norm == "rms+1" else 0.0
        yield Small(_name(kind, i), 1, lambda: self._checkpoint.tensor(f"{name}.weight").float() + offset)
        if self._checkpoint.has(f"{name}.bias"):
            yield Small(_name(kind, i, "bias"), 1, lambda: self._checkpoint.tensor(f"{name}.bias"))

    def _order(self, kind: MODEL_TENSOR) -> Tensor | None:
        """The order that llama.cpp wants the rows of queries and keys in."""
        spec = self._spec
        if kind is MODEL_TENSOR.ATTN_QKV and spec.names.by_head:
            rows = torch.arange(3 * spec.heads * spec.head_size)
            return rows.view(spec.heads, 3, spec.head_size).transpose(0, 1).flatten()
        if not self._architecture.neighbours or kind not in (MODEL_TENSOR.ATTN_Q, MODEL_TENSOR.ATTN_K):
            return None
        heads = spec.heads if kind is MODEL_TENSOR.ATTN_Q else spec.key_value_heads
        rows = torch.arange(heads * spec.head_size)
        return rows.view(heads, 2, spec.head_size // 2).transpose(1, 2).flatten()

    def _table(self, kind: MODEL_TENSOR, name: str) -> Large:
        elements = self._elements(name, "Embedding")
        return Large(_name(kind), elements, lambda: [self._checkpoint.matrix(name, "Embedding")], table=True)

    def _elements(self, name: str, kind: str = "Linear") -> int:
        found = self._checkpoint.layout(name, kind)
        return found.rows * found.columns

    def _first(self, names: list[str]) -> str:
        for name in names:
            if self._checkpoint.has_matrix(name):
                return name
        raise RuntimeProblem(f"{self._checkpoint.path}: the checkpoint lacks {names[0]}")

    def _is_factored(self, name: str) -> bool:
        """Whether it is NVFP4 in whole blocks of GGUF's: of 64, two codes in a byte."""
        packed = f"{name}.weight_packed"
        return self._checkpoint.has(f"{name}.weight_global_scale") and self._checkpoint.shape(packed)[-1] % 32 == 0

    def _refuse_bias(self, name: str) -> None:
        # Some tools write a bias of zeros for every linear.
        if self._checkpoint.has(f"{name}.bias") and self._checkpoint.tensor(f"{name}.bias").any():
            arch = self._architecture.arch.name
            raise RuntimeProblem(
                f"{self._checkpoint.path}: {name} has a bias, which llama.cpp's {arch} does not support"
            )


def _name(kind: MODEL_TENSOR, i: int | None = None, suffix: str = "weight") -> str:
    return f"{TENSOR_NAMES[kind].format(bid=i)}.{suffix}"
