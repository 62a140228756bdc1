"""Depth structures that can be removed: whole blocks, or only the attention or feed-forward part of some.

Hugging Face code does not support blocks without one of their parts, so a part is removed by zeroing its output matrix:
every tool computes the same, and the runtime, which reads ``layer_parts`` in ``config.json``, skips the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from ...models.checkpoint.weights import ChangedWeights, Weights
from ...models.streaming.streamed import StreamedModel
from ...models.structure.attention import cached_attention
from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from . import axes
from .drop_blocks import LAYER_PARTS, can_lose, drop_blocks

_OTHER = {"attention": "mlp", "mlp": "attention"}


class Removable(Protocol):
    """One kind of structure that can be removed.

    Attributes:
        noun, plural: its name.
        candidates: the blocks that have it.
    """

    noun: str
    plural: str
    candidates: list[int]

    def possible(self, removed: Iterable[int]) -> bool:
        """Whether these can be removed together."""
        ...

    def without(self, index: int, streamed: StreamedModel, block: nn.Module, hidden: Tensor) -> Tensor:
        """The output of a block, whose weights are loaded, for hidden states if this is removed from it."""
        ...

    def left(self, removed: Iterable[int]) -> OpenModel:
        """The model without these."""
        ...


class WholeBlocks:
    """Blocks as a whole.

    Args:
        model: the model.
        merging: whether removed blocks are merged into the kept one before them.
    """

    noun, plural = "block", "blocks"

    def __init__(self, model: OpenModel, *, merging: bool) -> None:
        self._model, self._merging = model, merging
        self.candidates = list(range(len(model.anatomy.blocks)))

    def possible(self, removed: Iterable[int]) -> bool:
        """Some attention must remain, and ``config.json`` must be able to express which blocks remain."""
        gone, parts = set(removed), layer_parts(self._model)
        attends = any(part in ("all", "attention") for index, part in enumerate(parts) if index not in gone)
        return attends and can_lose(self._model, gone)

    def without(self, index: int, streamed: StreamedModel, block: nn.Module, hidden: Tensor) -> Tensor:
        return hidden

    def left(self, removed: Iterable[int]) -> OpenModel:
        return drop_blocks(self._model, removed, merging=self._merging)


class BlockParts:
    """The attention, or the feed-forward part, of blocks.

    Args:
        model: the model.
        kind: ``attention`` or ``mlp``.

    Raises:
        SmeltError: the part is not found, or its blocks do more than add their parts.
    """

    def __init__(self, model: OpenModel, kind: str) -> None:
        self._model, self._kind = model, kind
        noun = {"attention": "attention", "mlp": "feed-forward part"}[kind]
        self.noun, self.plural = f"{noun} of block", f"{noun}s of blocks"
        self._closing = closing_linears(model, kind)
        others = closing_linears(model, _OTHER[kind])
        name = model.architecture
        for index in range(len(model.anatomy.blocks)):
            if set(self._closing[index]) & set(others[index]):
                raise SmeltError(f"{name}: block {index} has one output matrix for attention and feed-forward")
        self._parts = layer_parts(model)
        self.candidates = [
            index for index, part in enumerate(self._parts) if part in ("all", kind) and self._closing[index]
        ]

    def possible(self, removed: Iterable[int]) -> bool:
        """Some attention must remain: without any, no token would see another."""
        return self._kind == "mlp" or bool(set(self.candidates) - set(removed))

    def without(self, index: int, streamed: StreamedModel, block: nn.Module, hidden: Tensor) -> Tensor:
        with _zero(block, self._closing[index]):
            return streamed.call(index, hidden).run(block, hidden)

    def left(self, removed: Iterable[int]) -> OpenModel:
        model, gone = self._model, set(removed)
        parts = list(self._parts)
        for index in gone:
            parts[index] = _OTHER[self._kind] if parts[index] == "all" else "none"
        closing = {
            f"{model.anatomy.blocks[index].name}.{name}.{leaf}"
            for index in gone
            for name in self._closing[index]
            for leaf in ("weight", "bias")
        }
        zero = {model.names[name] for name in closing if name in model.names}
        directory = model.directory.changed({LAYER_PARTS: parts})
        return OpenModel(directory, _SomeZero(model.weights, zero), is_edited=model.is_edited)


def layer_parts(model: OpenModel) -> list[str]:
    """For each block its remaining parts: ``all``, ``attention``, ``mlp`` or ``none``."""
    return getattr(model.config, LAYER_PARTS, None) or ["all"] * len(model.anatomy.blocks)


def closing_linears(model: OpenModel, kind: str) -> list[tuple[str, ...]]:
    """By block, the linears whose outputs are all that a part adds; names within the block."""
    axis = axes.feed_forward(model, alike=False)
    found: list[tuple[str, ...]] = []
    for index, anatomy in enumerate(model.anatomy.blocks):
        name = cached_attention(model.skeleton.blocks[index])
        linears = [linear for group in anatomy.groups for linear in group.linears]
        if kind == "mlp":
            readers = tuple(reader.removeprefix(f"{anatomy.name}.") for reader in axis.of_block(anatomy.name))
            # A dense block among mixtures has a separate width, whose units are not the experts'.
            others = [linear for linear in linears if name is not None and not linear.startswith(f"{name}.")]
            found.append(readers or tuple(others[-1:]))
            continue
        if name is not None:
            inside = [linear for linear in linears if linear.startswith(f"{name}.")]
        else:  # GPT-NeoX's has no cache argument: it is the part that is not feed-forward
            feeding = {span for reader in axis.of_block(anatomy.name) for span in axis.readers[reader]}
            inside = [linear for linear in linears if f"{anatomy.name}.{linear}.weight" not in feeding]
        if not inside:
            raise SmeltError(
                f"{model.architecture}: Smelt does not find the attention of block {index}, so it cannot be removed"
            )
        found.append((inside[-1],))
    return found


def check_parts(model: OpenModel, streamed: StreamedModel, tokens: Tensor) -> None:
    """Check that a block of every kind, without both of its parts, is the identity.

    Raises:
        SmeltError: it is not.
    """
    closing_of = [closing_linears(model, kind) for kind in _OTHER]
    kinds = {model.block_shape(index): index for index in reversed(range(len(model.anatomy.blocks)))}
    with closing(streamed.embed(tokens)) as store:
        for index in kinds.values():
            with (
                streamed.block(index) as block,
                _zero(block, [name for each in closing_of for name in each[index]]),
                torch.no_grad(),
            ):
                hidden = store.read(slice(None))
                same = torch.equal(streamed.call(index, hidden).run(block, hidden.clone()), hidden)
            if not same:
                raise SmeltError(
                    f"{model.architecture}: its blocks do more than add attention and a feed-forward"
                    " part, so these cannot be removed separately"
                )


@contextmanager
def _zero(block: nn.Module, linears: Iterable[str]) -> Iterator[None]:
    """Let some linears output zero within this context."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for name in linears:
            for parameter in block.get_submodule(name).parameters(recurse=False):
                kept.append((parameter, parameter.data))
                parameter.data = torch.zeros_like(parameter.data)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


class _SomeZero(ChangedWeights):
    """The tensors of a model, some of them zero."""

    def __init__(self, source: Weights, zero: set[str]) -> None:
        super().__init__(source)
        self._zero = zero

    def load(self, name: str) -> Tensor:
        tensor = self._source.load(name)
        return torch.zeros_like(tensor) if name in self._zero else tensor
