"""Attention and feed-forward of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ..heads import Heads
from ..weights.layout import Ranges
from ..weights.matrix import Matrix
from .adapters import AdaptedLinear, AdapterTarget, StepRows
from .architectures import DecoderSpec, LayerSpec, Names
from .linears.linear import Linear
from .loader import DecoderLoader, shifted
from .parallel.expert_parallel import DividedExperts
from .parallel.sharded import SummedFeedForward
from .parts.batch import Batch
from .parts.draft_inputs import JoinedInputs
from .parts.feed_forward import ExpertChoice, GatedFeedForward, PlainFeedForward, RoutedFeedForward
from .parts.kv_cache import KeysValues
from .parts.layer_order import stages_of
from .parts.operators import Experts, FeedForward, LayerParts, Rowwise


class DecoderLayer:
    """Attention and feed-forward of one layer."""

    def __init__(self, load: DecoderLoader, spec: DecoderSpec, layer: LayerSpec, index: int) -> None:
        names, prefix = spec.names, spec.names.layer.format(i=index)
        self._spec, self._layer, self._prefix = spec, layer, prefix
        self.attends = layer.attends

        def at(name: str | None) -> str | None:
            return None if name is None else prefix + name

        heads, shared = layer.heads or spec.heads, layer.key_value_heads or spec.key_value_heads
        size = spec.head_size
        ranks = self._ranks = load.ranks
        self._all_heads = [ranks.heads(heads, shared, rank) for rank in range(ranks.count)]
        mine, self.shared = self._all_heads[ranks.rank]
        self._widths = [len(mine) * size, len(self.shared) * size, len(self.shared) * size]
        self._heads = Heads(len(mine), len(self.shared), size, layer.scale, layer.window, spec.score_cap)
        self._query_key_value: Linear | None = None
        self._out: Linear | None = None
        self._rows_by_head: Tensor | None = None
        if layer.attends:
            rows = None
            if names.by_head:
                rows = self._rows_by_head = (
                    torch.arange(3 * len(mine) * size).view(len(mine), 3, size).transpose(0, 1).flatten()
                )
            self._query_key_value = load.linear(
                *(prefix + name for name in names.query_key_value),
                rows=rows,
                shape=(sum(self._widths), (2 if layer.joined else 1) * spec.hidden),
                outputs=None if ranks.count == 1 else _outputs(names, heads, shared, size, mine, self.shared),
            )
            begins = [each.start * size for each, _ in self._all_heads]
            self._out = load.divided_inputs(
                prefix + names.out, [*begins, heads * size], shape=(spec.hidden, heads * size)
            )
        else:
            load.check_removed(prefix + names.out)
        self._attend, self._add = load.attention(self._heads), load.operators.add
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
        if layer.joined:
            self._norms["before_attention"] = JoinedInputs(self._norms["before_attention"])
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
            normed = [
                self._whole(norm, part, place) for norm, part, place in ((query_norm, queries, 0), (key_norm, keys, 1))
            ]
            return torch.cat([*normed, values], dim=-1)
        size = self._spec.head_size
        # Not unflatten, at which torch.compile breaks the graph.
        by_head = [
            norm(part.reshape(len(part), part.shape[-1] // size, size)).flatten(1)
            for norm, part in ((query_norm, queries), (key_norm, keys))
        ]
        return torch.cat([*by_head, values], dim=-1)

    def _whole(self, norm: Rowwise, part: Tensor, place: int) -> Tensor:
        """A norm of all ranks' queries, or keys."""
        if self._ranks.count == 1:
            return norm(part)
        heads = [each[place] for each in self._all_heads]
        size = self._spec.head_size
        whole = self._ranks.all_gather(part, [len(each) * size for each in heads])
        # Where ranks have copies of a head, the first one's is taken.
        first = [i for i, each in enumerate(heads) if i == 0 or each.start != heads[i - 1].start]
        if len(first) < len(heads):
            each = whole.split([len(one) * size for one in heads], dim=-1)
            whole = torch.cat([each[i] for i in first], dim=-1)
        mine = heads[self._ranks.rank]
        return norm(whole)[..., mine.start * size : mine.stop * size]

    def _parts(self) -> LayerParts:
        """The layer's parts."""
        names = self._spec.names
        return LayerParts(
            self._spec.order,
            {
                "before_attention": self._norms["before_attention"]
                if names.before_attention or self._layer.joined
                else None,
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


def _outputs(names: Names, heads: int, shared: int, size: int, mine: range, own: range) -> list[Ranges]:
    """A rank's outputs of the matrices of queries, keys and values."""
    if names.by_head:
        return [[range(3 * size * mine.start, 3 * size * mine.stop)]]
    queries, keys = (range(each.start * size, each.stop * size) for each in (mine, own))
    if len(names.query_key_value) == 3:
        return [[queries], [keys], [keys]]
    return [[queries, *(shifted(keys, (heads + skipped) * size) for skipped in (0, shared))]]


def _feed_forward(load: DecoderLoader, spec: DecoderSpec, prefix: str) -> FeedForward:
    up = tuple(prefix + name for name in spec.names.gate_up)
    down = prefix + spec.names.down
    if spec.gated:
        return _gated(load, up, down, load.operators.gate(spec.activation))
    inner = load.inner(up, down)
    stored = load.stack(*up, outputs=load.own(inner))
    assert stored is not None  # there is one matrix
    shape = _down_shape(load, up, stored[0], 1)
    fused = load.operators.activated(*stored, spec.activation)
    activation = None if fused else ACT2FN[spec.activation]
    return PlainFeedForward(
        fused or load.operators.linear(*stored), load.divided_inputs(down, inner, shape=shape), activation
    )


def _gated(
    load: DecoderLoader, gate_up: tuple[str, ...], down: str, gate: Rowwise, *, sums: bool = True
) -> GatedFeedForward:
    inner = load.inner(gate_up, down)
    outputs = load.own(inner, gate_up)
    stored = load.stack(*gate_up, outputs=outputs)
    shape = _down_shape(load, gate_up, None if stored is None else stored[0], 2)
    if stored is None:
        both, last = load.side_by_side(gate_up, outputs), load.divided_inputs(down, inner, sums=sums, shape=shape)
        return GatedFeedForward(both, last, gate)
    fused = load.operators.gated(*stored, load.spec.activation)
    first = fused or load.operators.linear(*stored)
    del stored  # so that it is freed while the other is packed
    return GatedFeedForward(first, load.divided_inputs(down, inner, sums=sums, shape=shape), None if fused else gate)


def _down_shape(load: DecoderLoader, up: tuple[str, ...], stored: Matrix | None, parts: int) -> tuple[int, int] | None:
    """What the second matrix must be, by what was read of the first ones: kernels see no shapes. None if ranks divide them, or they are apart."""
    if load.ranks.count > 1 or stored is None:
        return None
    rows = stored.shape[0] // parts
    load.check(" + ".join(up), stored.shape, (parts * rows, load.spec.hidden))
    return load.spec.hidden, rows


def _experts(load: DecoderLoader, spec: DecoderSpec, prefix: str) -> FeedForward:
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
    gathered = load.tensor(f"{router}.weight", (spec.experts, spec.hidden))
    choose = ExpertChoice(load.operators.router(gathered), spec.experts_per_token, spec.normalized_experts)
    if load.divides_experts:
        begins = load.ranks.bounds(spec.experts)
        own, whole = range(begins[load.ranks.rank], begins[load.ranks.rank + 1]), load.undivided()
        experts = {e: _gated(whole, named[e][0], named[e][1], gate) for e in own}
        return DividedExperts(choose, experts, begins, load.ranks)
    alone = load.ranks.count == 1
    together = _grouped(load, named) if alone and load.operators.groups_experts(spec.activation) else None
    forward = RoutedFeedForward(
        choose,
        together,
        [] if together is not None else [_gated(load, up, down, gate, sums=False) for up, down in named],
    )
    mixture = load.operators.mixture(forward)
    return mixture if alone else SummedFeedForward(mixture, load.ranks)


def _grouped(load: DecoderLoader, named: list[tuple[tuple[str, str], str]]) -> Experts | None:
    """All experts together, if they have no biases and their inputs are rounded alike."""
    parts = [load.stack(*names) for up, down in named for names in (up, (down,))]
    matrices = [part[0] for part in parts if part is not None and part[1] is None]
    if len(matrices) < len(parts):
        return None
    return load.operators.experts(matrices[0::2], matrices[1::2], load.spec.activation)
