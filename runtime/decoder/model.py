"""One decoder for all architectures, driven by a :class:`DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from ...system.errors import RuntimeProblem
from ...system.pages import in_large_pages
from ..heads import Heads
from ..weights.cache_scheme import cache_scheme
from ..weights.checkpoint import Checkpoint
from ..weights.live_weights import LiveWeights
from ..weights.matrix import Matrix, see_the_same, stacked
from .adapters import AdaptedLinear, Adapters, AdapterTarget, StepRows
from .architectures import DecoderSpec, LayerSpec, spec_of
from .batch import Batch
from .feed_forward import GatedFeedForward, PlainFeedForward, RoutedFeedForward
from .kv_cache import KeysValues
from .layer_order import stages_of
from .linear import Linear, SideBySide
from .operators import Experts, FeedForward, LayerParts, Operators, Rotation, Rowwise
from .rope import Rotations
from .token_table import TokenTable


class Model:
    """A decoder with its weights.

    Attributes:
        spec: its architecture.
        operators: its implementation of the parts.
        dtype: its compute dtype.
        device: where.
        head: final norm and lm_head.
        logit_statistics: computes statistics of rows of logits.
        stack: computes all layers at once, where supported.
        rotations: its rotary positions.
        cache_scheme: how keys and values are rounded, if the checkpoint sets it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | LiveWeights,
        operators: Operators,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec = spec_of(checkpoint.config)
        checkpoint.check()
        self.operators = operators
        self.dtype = dtype = operators.dtype
        self.device = operators.device
        self.logit_statistics = operators.logit_statistics
        load = _DecoderLoader(checkpoint, self.spec, operators)
        names = self.spec.names
        self._embedding = load.table(names.embedding, self.spec.vocabulary)
        self._positions = load.tensor(f"{names.positions}.weight", None) if names.positions else None
        self._project_in = load.linear(names.project_in) if names.project_in else None
        self._layers: list[_Layer] = []
        for i, layer in enumerate(self.spec.layers):
            self._layers.append(_Layer(load, self.spec, layer, i))
            if progress:
                progress(i + 1, len(self.spec.layers))
        self.cache_scheme = cache_scheme(
            checkpoint.cache_args,
            checkpoint,
            [
                names.layer.format(i=i) + names.query_key_value[0].rpartition(".")[0]
                for i, layer in enumerate(self.spec.layers)
                if layer.attends
            ],
            self.spec.cached_heads,
            self.spec.head_size,
        )
        self._run = operators.lower(self._through_layers)
        self.stack = operators.stack([layer.parts for layer in self._layers])
        if self.spec.tied or not checkpoint.has_matrix(names.head):
            head = operators.linear(self._embedding.matrix, None)
        else:
            head = load.linear(names.head)
        project_out = load.linear(names.project_out) if names.project_out else None
        self.head = Head(load.norm(names.final_norm), project_out, head, self.spec.logit_cap, operators.to_float32)
        self.rotations = Rotations(self.spec.ropes, dtype)
        scale = self.spec.embedding_scale
        # In the model's dtype, as in transformers.
        self._embedding_scale = None if scale is None else torch.tensor(scale, device=self.device).to(dtype)
        self._adapters: Adapters | None = None

    @torch.inference_mode()
    def __call__(self, batch: Batch, store: KeysValues) -> Tensor:
        """Logits ``[wanted, vocabulary]`` of a step's tokens; their keys and values go to ``store``."""
        hidden = self.hidden(batch, store)
        return self.head(hidden if len(batch.wanted) == len(batch.tokens) else hidden[batch.wanted])

    @torch.inference_mode()
    def hidden(self, batch: Batch, store: KeysValues) -> Tensor:
        """The last layer's outputs for a step's tokens, ``[tokens, hidden]``; :attr:`head` computes logits from them."""
        hidden = self.embed(batch.tokens, batch.positions)
        rotations = self.rotations.of(batch.positions, batch.lengths)
        if self._adapters is not None and (batch.adapted or self._adapters.rows.of):
            self._adapters.rows.of = batch.adapted
        if batch.adapted:
            return self._through_layers(hidden, rotations, store, batch)
        if self.stack is not None and self.stack.takes(batch, store):
            return self.stack(hidden, rotations, store, batch)
        return self._run(hidden, rotations, store, batch)

    def adapters(self) -> Adapters:
        """The LoRA adapters beside it; the first call makes its linears ready for them.

        Raises:
            RuntimeProblem: its operators cannot apply any.
        """
        if not self.operators.takes_adapters:
            raise RuntimeProblem(
                "adapters are applied on a CPU, without compile and reproducible; set these so, or merge the adapter with smelt merge"
            )
        if self._adapters is None:
            rows = StepRows()
            targets = [target for layer in self._layers for target in layer.adapt(rows)]
            self._adapters = Adapters(targets, rows, self.dtype, self.device)
        return self._adapters

    def _through_layers(
        self, hidden: Tensor, rotations: dict[str, Rotation], store: KeysValues, batch: Batch
    ) -> Tensor:
        cached = 0
        for layer in self._layers:
            hidden = layer(hidden, rotations, store, cached, batch)
            cached += layer.attends
        return hidden

    @torch.inference_mode()
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The first layer's inputs."""
        hidden = self._embedding(tokens)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            hidden = hidden + functional.embedding(positions + self.spec.position_offset, self._positions)
        return hidden

    def kept(self, wanted: torch.dtype) -> torch.dtype:
        """The KV cache dtype: the requested one, unless the checkpoint sets how keys and values are rounded."""
        if self.cache_scheme is None:
            return wanted
        codes = self.cache_scheme.kept
        return self.dtype if codes is None or not self.operators.keeps(codes) else codes

    def keys_values(self, blocks: int, block_size: int, wanted: torch.dtype) -> KeysValues:
        """An empty cache for this model."""
        spec, scheme, kept = self.spec, self.cache_scheme, self.kept(wanted)
        rules = None if scheme is None else scheme.rules(self.dtype, kept, self.device)
        return self.operators.keys_values(spec.cached_heads, spec.head_size, blocks, block_size, kept, rules)

    @property
    def cache_variants(self) -> bool:
        """Whether equal tokens may have different keys, because RoPE depends on the sequence's largest length."""
        return self.rotations.by_length

    def variant(self, length: int) -> tuple[int, ...]:
        """An identifier of the RoPE variant of sequences that may grow to ``length``."""
        return tuple(self.rotations.variants(length).values())

    def linears(self) -> dict[str, Linear]:
        """Every linear, by role."""
        found = {"head": self.head.linear}
        for i, layer in enumerate(self._layers):
            found |= {f"layer {i} {role}": module for role, module in layer.linears().items()}
        return found

    def bytes_per_token(self) -> int:
        """Bytes of weights that a single token reads; for a mixture of experts, those of the chosen experts."""
        return int(sum(self._share(role) * module.nbytes for role, module in self.linears().items()))

    def operations_per_token(self) -> float:
        """Additions and multiplications of the linears, for one token of a prompt; the head reads only the last one."""
        return sum(2 * self._share(role) * module.numel for role, module in self.linears().items() if role != "head")

    def _share(self, role: str) -> float:
        return self.spec.experts_per_token / self.spec.experts if " expert " in role else 1.0

    def nbytes(self) -> int:
        """Memory of the weights."""
        embedding = (
            0 if self.spec.tied and self.head.linear.nbytes == self._embedding.nbytes else self._embedding.nbytes
        )
        return embedding + sum(module.nbytes for module in self.linears().values())


class Head:
    """The final norm and lm_head.

    Attributes:
        linear: the lm_head.
    """

    def __init__(
        self,
        norm: Rowwise,
        project: Linear | None,
        linear: Linear,
        cap: float | None,
        to_float32: Callable[[Tensor, Tensor | None], Tensor],
    ) -> None:
        self._norm, self._project, self.linear, self._cap, self._to_float32 = norm, project, linear, cap, to_float32

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, vocabulary]``, in float32; to ``out``, if there is one."""
        logits = self.linear(self.states(hidden))
        logits = self._to_float32(logits, out)
        if self._cap is None:
            return logits
        if out is not None:
            return out.div_(self._cap).tanh_().mul_(self._cap)
        return torch.tanh(logits / self._cap) * self._cap

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        """What the lm_head multiplies: transformers' ``last_hidden_state``."""
        hidden = self._norm(hidden)
        return hidden if self._project is None else self._project(hidden)


class _DecoderLoader:
    """Builds a decoder's parts from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint | LiveWeights, spec: DecoderSpec, operators: Operators) -> None:
        self.checkpoint = checkpoint
        self.spec = spec
        self.operators = operators
        self.dtype = operators.dtype

    def tensor(self, name: str, shape: tuple[int | None, ...] | None) -> Tensor:
        """A dense tensor, in the compute dtype."""
        found = self.checkpoint.tensor(name)
        if shape is not None:
            self._check(name, found.shape, shape)
        return found.to(self.operators.device, self.dtype)

    def table(self, name: str, rows: int) -> TokenTable:
        """The input embedding."""
        found = self.checkpoint.matrix(name, "Embedding")
        self._check(f"{name}.weight", found.shape, (rows, None))
        shared = found.scale is None and (self.spec.tied or not self.checkpoint.has_matrix(self.spec.names.head))
        if shared and self.operators.device.type == "cpu":
            # So that lm_head need not copy it.
            found = Matrix.plain(in_large_pages(found.values.to(self.dtype)))
        return TokenTable(found, self.dtype, self.operators.device)

    def _check(self, name: str, found: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
        if any(want not in (None, have) for want, have in zip(wanted, found, strict=False)):
            raise RuntimeProblem(
                f"{self.checkpoint.path}: {name} has the shape {list(found)}, the config says {list(wanted)}"
            )

    def matrix(self, name: str) -> Matrix:
        found = self.checkpoint.matrix(name)
        if self.spec.names.transposed:
            return Matrix.plain(found.dense(self.dtype).T.contiguous(), found.inputs)
        return found

    def linear(self, *names: str, rows: Tensor | None = None, shape: tuple[int, int] | None = None) -> Linear:
        """One linear of several matrices: stacked, or computed separately where necessary."""
        found = self.stack(*names, rows=rows, shape=shape)
        return self.side_by_side(names) if found is None else self.operators.linear(*found)

    def side_by_side(self, names: tuple[str, ...]) -> Linear:
        """Several linears of the same inputs, computed separately."""
        return SideBySide([self.linear(name) for name in names])

    def stack(
        self, *names: str, rows: Tensor | None = None, shape: tuple[int, int] | None = None
    ) -> tuple[Matrix, Tensor | None] | None:
        """Several matrices stacked, and their biases; None if their inputs are not rounded alike."""
        self.checkpoint.place_together(names)
        parts = [self.matrix(name) for name in names]
        found = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        if shape is not None and found != shape:
            raise RuntimeProblem(
                f"{self.checkpoint.path}: {' + '.join(names)} has the shape {list(found)}, the config says {list(shape)}"
            )
        if not see_the_same(parts):
            return None
        matrix = stacked(parts, self.dtype)
        biases = [self.checkpoint.optional(f"{name}.bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            sizes = [self.matrix(name).shape[0] for name in names] if any(b is None for b in biases) else []
            bias = torch.cat([torch.zeros(sizes[i]) if b is None else b for i, b in enumerate(biases)])
        if rows is not None:
            matrix, bias = matrix.rows(rows), None if bias is None else bias[rows]
        return matrix, bias

    def norm(self, name: str | None) -> Rowwise:
        """A norm; None without a name."""
        if name is None:
            return lambda hidden: hidden
        eps = self.spec.eps
        weight = self.checkpoint.optional(f"{name}.weight")
        if self.spec.norm == "layer":
            device = self.operators.device
            shift = self.checkpoint.optional(f"{name}.bias")
            return self.operators.layer_norm(
                None if weight is None else weight.to(device, self.dtype),
                None if shift is None else shift.to(device, self.dtype),
                eps,
            )
        if weight is None:
            raise RuntimeProblem(f"{self.checkpoint.path}: the checkpoint lacks {name}.weight")
        wide = weight.to(self.operators.device).float()
        if self.spec.norm == "rms+1":
            return self.operators.rms_norm(1.0 + wide, eps, rounds_first=False)
        # OLMo 2 multiplies before it rounds.
        return self.operators.rms_norm(wide, eps, rounds_first=self.spec.names.after_mlp is None)

    def check_removed(self, *names: str) -> None:
        """Check that the output matrices of a part that the config marks as removed are zero, as other tools still compute it."""
        for name in names:
            if self.checkpoint.has_matrix(name) and self.checkpoint.matrix(name).dense(self.dtype).any():
                raise RuntimeProblem(
                    f"{self.checkpoint.path}: {name} is not zero, but layer_parts in config.json marks it as removed;"
                    " the two do not match"
                )

    def first_of(self, names: tuple[str, ...]) -> str:
        """The spelling that the checkpoint uses."""
        for name in names:
            if self.checkpoint.has_matrix(name):
                return name
        raise RuntimeProblem(f"{self.checkpoint.path}: the checkpoint lacks {names[0]}")


class _Layer:
    """Attention and feed-forward of one layer."""

    def __init__(self, load: _DecoderLoader, spec: DecoderSpec, layer: LayerSpec, index: int) -> None:
        names, prefix = spec.names, spec.names.layer.format(i=index)
        self._spec, self._layer, self._prefix = spec, layer, prefix
        self.attends = layer.attends

        def at(name: str | None) -> str | None:
            return None if name is None else prefix + name

        heads, shared = layer.heads or spec.heads, layer.key_value_heads or spec.key_value_heads
        size = spec.head_size
        self._widths = [heads * size, shared * size, shared * size]
        self._heads = Heads(heads, shared, size, layer.scale, layer.window, spec.score_cap)
        self._query_key_value: Linear | None = None
        self._out: Linear | None = None
        self._rows_by_head: Tensor | None = None
        if layer.attends:
            rows = None
            if names.by_head:
                rows = self._rows_by_head = (
                    torch.arange(3 * heads * size).view(heads, 3, size).transpose(0, 1).flatten()
                )
            self._query_key_value = load.linear(
                *(prefix + name for name in names.query_key_value), rows=rows, shape=(sum(self._widths), spec.hidden)
            )
            self._out = load.linear(prefix + names.out, shape=(spec.hidden, heads * size))
        else:
            load.check_removed(prefix + names.out)
        self._attend, self._add = load.operators.attention(self._heads), load.operators.add
        self._query_norm = load.norm(at(names.query_norm)) if spec.query_key_norm else None
        self._key_norm = load.norm(at(names.key_norm)) if spec.query_key_norm else None
        named = {
            "before_attention": names.before_attention,
            "after_attention": names.after_attention,
            "before_mlp": names.before_mlp,
            "after_mlp": names.after_mlp,
        }
        self._norms: dict[str | None, Rowwise] = {None: load.norm(None)}
        self._norms |= {which: load.norm(at(name)) for which, name in named.items()}
        self._mlp = None
        if layer.feeds:
            self._mlp = _experts(load, spec, prefix) if layer.sparse else _feed_forward(load, spec, prefix)
        else:
            each = (
                [n.format(e=e) for n in names.expert_down for e in range(spec.experts)]
                if layer.sparse
                else [names.down]
            )
            load.check_removed(*(prefix + name for name in each))
        self._stages = stages_of(spec.order, self._out is not None, self._mlp is not None)
        self.parts = self._parts()

    def __call__(
        self,
        hidden: Tensor,
        rotations: dict[str, tuple[Tensor, Tensor]],
        store: KeysValues,
        index: int,
        batch: Batch,
    ) -> Tensor:
        for stage in self._stages:
            added = None
            # In reverse, the order in which transformers adds the parts of a stage: the feed-forward part first.
            for branch in reversed(stage.branches):
                read = self._norms[branch.before](hidden)
                if branch.part == "attention":
                    found = self._attention(read, rotations, store, index, batch)
                else:
                    assert self._mlp is not None
                    found = self._mlp(read)
                found = self._norms[branch.after](found)
                added = found if added is None else self._add(added, found)
            if added is not None:
                hidden = self._add(hidden, added)
            hidden = self._norms[stage.closing](hidden)
        return hidden

    def _attention(
        self,
        hidden: Tensor,
        rotations: dict[str, tuple[Tensor, Tensor]],
        store: KeysValues,
        index: int,
        batch: Batch,
    ) -> Tensor:
        assert self._query_key_value is not None
        assert self._out is not None
        projected = self._query_key_value(hidden)
        if self._query_norm and self._key_norm:
            projected = self._normed(projected, self._query_norm, self._key_norm)
        rotation = None if self._layer.rope is None else rotations[self._layer.rope]
        return self._out(self._attend(projected, rotation, store, index, batch))

    def _normed(self, projected: Tensor, query_norm: Rowwise, key_norm: Rowwise) -> Tensor:
        """Norms of queries and keys, by head or as a whole."""
        queries, keys, values = projected.split(self._widths, dim=-1)
        if self._spec.query_key_norm == "whole":
            return torch.cat([query_norm(queries), key_norm(keys), values], dim=-1)
        size = self._spec.head_size
        # Not unflatten, at which torch.compile breaks the graph.
        by_head = [
            norm(part.reshape(len(part), -1, size)).flatten(1)
            for norm, part in ((query_norm, queries), (key_norm, keys))
        ]
        return torch.cat([*by_head, values], dim=-1)

    def _parts(self) -> LayerParts:
        """The layer's parts."""
        names = self._spec.names
        return LayerParts(
            self._spec.order,
            {
                "before_attention": self._norms["before_attention"] if names.before_attention else None,
                "query_norm": self._query_norm,
                "key_norm": self._key_norm,
                "after_attention": self._norms["after_attention"] if names.after_attention else None,
                "before_mlp": self._norms["before_mlp"] if names.before_mlp else None,
                "after_mlp": self._norms["after_mlp"] if names.after_mlp else None,
            },
            self._query_key_value,
            self._out,
            self._mlp,
            self._heads,
            self._spec.query_key_norm == "whole",
            self._spec.activation,
            self._layer.rope,
        )

    def adapt(self, rows: StepRows) -> list[AdapterTarget]:
        """Replace its linears by those that apply adapters.

        Args:
            rows: of the step that runs.

        Returns:
            What adapters may change.
        """
        names = self._spec.names
        targets: list[AdapterTarget] = []

        def adapted(
            linear: Linear, modules: Sequence[str], sizes: Sequence[int], order: Tensor | None = None
        ) -> Linear:
            sizes = sizes if len(sizes) == len(modules) else [sum(sizes)]
            target = AdapterTarget([self._prefix + name for name in modules], sizes, linear.columns, order)
            targets.append(target)
            return AdaptedLinear(linear, rows, target.factors)

        hidden = self._spec.hidden
        if self._query_key_value is not None and self._out is not None:
            self._query_key_value = adapted(
                self._query_key_value, names.query_key_value, self._widths, self._rows_by_head
            )
            self._out = adapted(self._out, [names.out], [hidden])
        match self._mlp:
            case GatedFeedForward() as mlp:
                inner = mlp.down.columns
                mlp.gate_up = adapted(mlp.gate_up, names.gate_up, [inner, inner])
                mlp.down = adapted(mlp.down, [names.down], [hidden])
            case PlainFeedForward() as mlp:
                mlp.up = adapted(mlp.up, names.gate_up, [mlp.down.columns])
                mlp.down = adapted(mlp.down, [names.down], [hidden])
            case _:  # none, or a mixture of experts, which adapters do not change here
                pass
        return targets

    def linears(self) -> dict[str, Linear]:
        found: dict[str, Linear] = {}
        if self._query_key_value is not None and self._out is not None:
            found |= {"query, key, value": self._query_key_value, "attention out": self._out}
        return found if self._mlp is None else found | self._mlp.linears()


def _feed_forward(load: _DecoderLoader, spec: DecoderSpec, prefix: str) -> FeedForward:
    up = tuple(prefix + name for name in spec.names.gate_up)
    if spec.gated:
        return _gated(load, up, prefix + spec.names.down, load.operators.gate(spec.activation))
    stored = load.stack(*up)
    assert stored is not None  # there is one matrix
    fused = load.operators.activated(*stored, spec.activation)
    activation = None if fused else ACT2FN[spec.activation]
    return PlainFeedForward(fused or load.operators.linear(*stored), load.linear(prefix + spec.names.down), activation)


def _gated(load: _DecoderLoader, gate_up: tuple[str, ...], down: str, gate: Rowwise) -> GatedFeedForward:
    stored = load.stack(*gate_up)
    if stored is None:
        return GatedFeedForward(load.side_by_side(gate_up), load.linear(down), gate)
    fused = load.operators.gated(*stored, load.spec.activation)
    first = fused or load.operators.linear(*stored)
    del stored  # so that it is freed while the other is packed
    return GatedFeedForward(first, load.linear(down), None if fused else gate)


def _experts(load: _DecoderLoader, spec: DecoderSpec, prefix: str) -> FeedForward:
    names = spec.names
    router = load.first_of(tuple(prefix + name for name in names.router))
    gate = load.operators.gate(spec.activation)
    named = []
    for e in range(spec.experts):
        pairs = {
            gate: (gate, up)
            for gate, up in (tuple(prefix + n.format(e=e) for n in pair) for pair in names.expert_gate_up)
        }
        gate_up = pairs[load.first_of(tuple(pairs))]
        down = load.first_of(tuple(prefix + name.format(e=e) for name in names.expert_down))
        named.append((gate_up, down))
    together = _grouped(load, named) if load.operators.groups_experts(spec.activation) else None
    forward = RoutedFeedForward(
        load.operators.router(load.tensor(f"{router}.weight", (spec.experts, spec.hidden))),
        spec.experts_per_token,
        spec.normalized_experts,
        together,
        [] if together is not None else [_gated(load, up, down, gate) for up, down in named],
    )
    return load.operators.mixture(forward)


def _grouped(load: _DecoderLoader, named: list[tuple[tuple[str, str], str]]) -> Experts | None:
    """All experts together, if they have no biases and their inputs are rounded alike."""
    parts = [load.stack(*names) for up, down in named for names in (up, (down,))]
    matrices = [part[0] for part in parts if part is not None and part[1] is None]
    if len(matrices) < len(parts):
        return None
    return load.operators.experts(matrices[0::2], matrices[1::2], load.spec.activation)
