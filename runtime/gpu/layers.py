"""All layers of a decoder on a GPU, in as few launches as their parts allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..decoder.parts.attention import attend
from ..decoder.parts.batch import Batch
from ..decoder.parts.draft_inputs import AuxStates, JoinedInputs
from ..decoder.parts.feed_forward import GatedFeedForward, PlainFeedForward, RoutedFeedForward
from ..decoder.parts.layer_order import Branch, stages_of
from ..decoder.parts.operators import LayerParts, Rotation
from ..decoder.parts.rope import rotate
from ..fusions import Fusions
from ..kernels.attention.attend_prompts import attend_prompts
from ..kernels.attention.attend_tokens import Storing, attend_tokens, may_store
from ..kernels.base.launch import overlapping_at
from ..kernels.rows.normalize_rows import Norm, normalize_rows
from ..kernels.rows.quantize_rows import code_room, quantize_rows
from ..kernels.rows.rotate_and_store import HeadNorms, RotaryTables, rotate_and_store
from ..kernels.tiles.tile import Tiles
from .cache import GpuKeysValues
from .gpu_step import GpuStep, gpu_step
from .linears import GpuLinear, Rounded
from .norms import GpuNorm


class GpuLayers:
    """The layers, for every kind of step.

    Args:
        parts: of each layer, from this folder's operators.
        dtype: the compute dtype.
        tiles: of the device.
        fusions: the fused launches.
        reach: called before each layer, with its number; None for nothing.

    Attributes:
        captures: whether no attention or mixture synchronizes, so that steps can be captured if no linear does.
    """

    def __init__(
        self,
        parts: list[LayerParts],
        dtype: torch.dtype,
        tiles: Tiles,
        fusions: Fusions,
        reach: Callable[[int], None] | None = None,
    ) -> None:
        self._reach = reach
        self._layers = [_GpuLayer(each, tiles, fusions) for each in parts]
        self._fusions = fusions
        self._dtype, self._heads, self._tiles = dtype, parts[0].heads, tiles
        self.captures = fusions.attention and not any(
            isinstance(each.feed_forward, RoutedFeedForward) and each.feed_forward.waits for each in parts
        )

    def takes(self, batch: Batch, store: Any) -> bool:
        """Every step."""
        return True

    def __call__(
        self, hidden: Tensor, rotations: dict[str, Rotation], store: Any, batch: Batch, aux: AuxStates | None = None
    ) -> Tensor:
        """From embeddings ``[tokens, hidden]``, which are overwritten, to the last layer's outputs."""
        return self.run(hidden, self.laid_out(rotations, store, batch), store, aux)

    def laid_out(self, rotations: dict[str, Rotation], store: GpuKeysValues, batch: Batch) -> GpuStep:
        """A step's lists, on the device."""
        return gpu_step(batch, rotations, self.tokens_of_tile(store))

    def run(self, hidden: Tensor, step: GpuStep, store: GpuKeysValues, aux: AuxStates | None = None) -> Tensor:
        """The same for a step whose lists are on the device."""
        stream = _Stream(hidden, self._fusions)
        with overlapping_at(hidden.shape[0]):
            cached = 0
            for number, layer in enumerate(self._layers):
                if self._reach is not None:
                    self._reach(number)
                if aux is not None and aux.wants(number):
                    aux.take(number, stream.value())
                layer.run(stream, step, store, cached)
                cached += layer.attends
            return stream.value()

    def tokens_of_tile(self, store: GpuKeysValues) -> int:
        """Tokens per attention tile."""
        return self._tiles.of_prompts(self._heads, self._dtype, store.layer(0).kind).tokens(self._heads.group)


class _Stream:
    """The residual stream, with a pending addition that the next norm fuses if possible."""

    def __init__(self, hidden: Tensor, fusions: Fusions) -> None:
        self._hidden = hidden
        self._fusions = fusions
        self._added: Tensor | None = None
        self._before: GpuNorm | None = None

    def value(self) -> Tensor:
        """The hidden states with everything added."""
        if self._added is not None:
            self._hidden = self._summed(None, None)[0]
        return self._hidden

    def normed(self, norm: GpuNorm | None, reader: GpuLinear | None) -> Tensor | Rounded:
        """A part's normed input, rounded if the linear that reads it requires that."""
        wanted = reader.wants(self._hidden.shape[0]) if reader is not None and self._fusions.rounding else None
        if norm is None and self._added is None and wanted is None:
            return self._hidden
        self._hidden, found, scales = self._summed(norm, wanted)
        if wanted is None:
            return found
        assert scales is not None
        return Rounded(found, scales, self._hidden.dtype)

    def take(self, linear: GpuLinear, x: Tensor | Rounded, after: GpuNorm | None) -> None:
        """Add a linear's outputs for ``x``, normed by ``after``."""
        rows = x.codes.shape[0] if isinstance(x, Rounded) else x.shape[0]
        if after is None and self._fusions.residual and linear.adds(rows):
            self._hidden = linear(self._read_by(linear, x), self.value())
        else:
            self.add(linear(self._read_by(linear, x)), after)

    def add(self, found: Tensor, after: GpuNorm | None) -> None:
        """Add it, normed by ``after``."""
        self._hidden = self.value()
        self._added, self._before = found, after

    def replace(self, hidden: Tensor) -> None:
        """Replace the hidden states."""
        self._hidden = hidden

    def _read_by(self, linear: GpuLinear, x: Tensor | Rounded) -> Tensor | Rounded:
        if isinstance(x, Rounded):
            return x
        wanted = linear.wants(x.shape[0])
        if wanted is None:
            return x
        return Rounded(*quantize_rows(x.contiguous(), wanted[0], by_block=wanted[1]), x.dtype)

    def _summed(
        self, norm: GpuNorm | None, wanted: tuple[torch.dtype, bool] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        added, before = self._added, self._before
        self._added = self._before = None
        code, by_block = wanted or (None, False)
        x, residual = (self._hidden, None) if added is None else (added, self._hidden)
        if self._fusions.norm:
            return normalize_rows(
                x,
                residual=residual,
                before=_described(before),
                norm=_described(norm),
                sums=residual,
                code=code,
                by_block=by_block,
            )
        x = x if before is None else before.plainly(x)
        sums = x if residual is None else residual + x
        found = sums if norm is None else norm.plainly(sums)
        if code is None:
            return sums, found, None
        return sums, *normalize_rows(found, code=code, by_block=by_block)[1:]


def _described(norm: GpuNorm | None) -> Norm | None:
    return None if norm is None else norm.norm


class _GpuLayer:
    def __init__(self, parts: LayerParts, tiles: Tiles, fusions: Fusions) -> None:
        self._forward = parts.feed_forward
        self._fusions = fusions
        entry = parts.norms["before_attention"]
        self._joined = entry if isinstance(entry, JoinedInputs) else None
        norms: dict[str | None, GpuNorm | None] = {
            name: None if isinstance(norm, JoinedInputs) else _checked(norm) for name, norm in parts.norms.items()
        }
        self._norms = norms | {None: None}
        self._stages = stages_of(parts.order, parts.out is not None, parts.feed_forward is not None)
        self._query_key_value: Any = parts.query_key_value
        self._out: Any = parts.out
        self.attends = parts.out is not None
        self._attention = _Attention(parts, norms["query_norm"], norms["key_norm"], tiles, fusions)

    def run(self, stream: _Stream, step: GpuStep, store: GpuKeysValues, index: int) -> None:
        """Go on with the residual stream."""
        for stage in self._stages:
            read = [self._read(stream, each) for each in stage.branches]
            for each, x in zip(stage.branches, read, strict=True):
                if each.part == "attention":
                    self._attend(stream, x, step, store, index, self._norms[each.after])
                else:
                    self._feed(stream, x, self._norms[each.after])
            if stage.closing is not None:
                stream.replace(_plain(stream.normed(self._norms[stage.closing], None)))

    def _read(self, stream: _Stream, branch: Branch) -> Tensor | Rounded:
        """The inputs of one of its parts."""
        if branch.part == "mlp":
            return stream.normed(self._norms[branch.before], self._first)
        if self._joined is not None:
            return self._joined(stream.value())
        return stream.normed(self._norms[branch.before], self._query_key_value)

    @property
    def _first(self) -> Any:
        """The only linear that reads the feed-forward part's input; None if others read it, too."""
        forward = self._forward
        if isinstance(forward, GatedFeedForward):
            return forward.gate_up
        return forward.up if isinstance(forward, PlainFeedForward) else None

    def _attend(
        self,
        stream: _Stream,
        x: Tensor | Rounded,
        step: GpuStep,
        store: GpuKeysValues,
        index: int,
        after: GpuNorm | None,
    ) -> None:
        stream.take(self._out, self._attention(self._query_key_value(x), step, store, index, self._out), after)

    def _feed(self, stream: _Stream, x: Tensor | Rounded, after: GpuNorm | None) -> None:
        forward = self._forward
        if isinstance(forward, GatedFeedForward):
            inner: Any = forward.gate_up
            activate, outer = forward.gate, forward.down
        elif isinstance(forward, PlainFeedForward):
            inner, activate, outer = forward.up, forward.activation, forward.down
        else:
            assert forward is not None
            stream.add(forward(_plain(x)), after)
            return
        found = inner(x)
        stream.take(outer, found if activate is None else activate(found), after)  # pyright: ignore[reportArgumentType]


class _Attention:
    """Norms of queries and keys, rotary positions, the cache, and attention."""

    def __init__(
        self,
        parts: LayerParts,
        query_norm: GpuNorm | None,
        key_norm: GpuNorm | None,
        tiles: Tiles,
        fusions: Fusions,
    ) -> None:
        self._heads, self._rope = parts.heads, parts.rope
        self._fusions, self._tiles = fusions, tiles
        # Where programs cannot see each other's stores, keys must be stored before attention begins.
        self._storing = (
            fusions.storing and fusions.rotation and fusions.attention and may_store(parts.heads, tiles.target)
        )
        self._rounds = fusions.rounding and tiles.target.splits
        self._query_norm, self._key_norm, self._whole = query_norm, key_norm, parts.whole_heads
        self._norms: HeadNorms | None = None
        if query_norm is not None and key_norm is not None:
            one, other = query_norm.norm, key_norm.norm
            assert one.weight is not None
            assert other.weight is not None
            self._norms = HeadNorms(one.weight, other.weight, one.eps, parts.whole_heads, one.rounds_first)

    def __call__(
        self, projected: Tensor, step: GpuStep, store: GpuKeysValues, index: int, reader: GpuLinear
    ) -> Tensor | Rounded:
        """The heads' outputs, rounded if the linear that reads them requires that and it saves a launch."""
        heads, cache = self._heads, store.layer(index)
        rotary = None if self._rope is None else step.rotary[self._rope]
        out = torch.empty(
            projected.shape[0], heads.queries * heads.size, dtype=projected.dtype, device=projected.device
        )
        tile = self._tiles.of_tokens(heads, projected.dtype, cache.kind)
        if self._storing and step.work is None and step.also is None and store.rules is None:
            storing = Storing(self._norms, rotary)
            return attend_tokens(projected, heads, cache, step.runs, out, storing_too=storing, tile=tile)
        if self._fusions.rotation and store.rules is None:
            queries = rotate_and_store(projected, heads, cache, step.slots, self._norms, rotary)
            if step.also is not None:
                rows, slots = step.also
                positions = None if rotary is None else replace(rotary, rows=rotary.rows[rows])
                rotate_and_store(projected[rows], heads, cache, slots, self._norms, positions)
        else:
            queries = self._rotated_plainly(projected, step, store, index, rotary)
        if not self._fusions.attention:
            assert step.batch is not None, "attention in plain torch needs the step's lists"
            found = attend(
                queries.unflatten(1, (-1, heads.size)), store, index, heads.scale, heads.window, heads.cap, step.batch
            )
            return found.flatten(1)
        wanted = reader.wants(projected.shape[0]) if self._rounds and not step.singles else None
        if step.work is not None and wanted is not None:
            to = code_room(out, wanted[0], by_block=wanted[1])
            prompts = self._tiles.of_prompts(heads, queries.dtype, cache.kind)
            attend_prompts(queries, heads, cache, step.runs, step.work, out, prompts, to)
            return Rounded(*to, out.dtype)
        if step.work is not None:
            prompts = self._tiles.of_prompts(heads, queries.dtype, cache.kind)
            attend_prompts(queries, heads, cache, step.runs, step.work, out, prompts)
        if step.singles:
            attend_tokens(queries, heads, cache, step.runs, out, tile=tile)
        return out

    def _rotated_plainly(
        self, projected: Tensor, step: GpuStep, store: GpuKeysValues, index: int, rotary: RotaryTables | None
    ) -> Tensor:
        heads = self._heads
        widths = [heads.queries * heads.size, heads.shared * heads.size, heads.shared * heads.size]
        queries, keys, values = projected.split(widths, dim=1)
        if self._query_norm is not None and self._key_norm is not None:
            by_head = not self._whole
            queries, keys = (
                norm.plainly(part.unflatten(1, (-1, heads.size)) if by_head else part).reshape(part.shape)
                for norm, part in ((self._query_norm, queries), (self._key_norm, keys))
            )
        queries, keys, values = (part.unflatten(1, (-1, heads.size)) for part in (queries, keys, values))
        if rotary is not None:
            cosines, sines = (part[rotary.rows.long()].unsqueeze(1) for part in (rotary.cosines, rotary.sines))
            queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
        store.write(index, step.slots, keys, values)
        if step.also is not None:
            rows, slots = step.also
            store.write(index, slots, keys[rows], values[rows])
        if self._fusions.attention:
            queries = store.rotated(index, queries)
        return queries.flatten(1).contiguous()


def _checked(norm: object) -> GpuNorm | None:
    assert norm is None or isinstance(norm, GpuNorm)
    return norm


def _plain(x: Tensor | Rounded) -> Tensor:
    assert isinstance(x, Tensor)
    return x
