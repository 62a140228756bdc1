"""Scores of the residual stream: which of its channels, or of its directions, to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...models.steps.block_loop import forward
from ...models.steps.step import RunContext
from ...models.streaming.streamed import LOGIT_TOKENS, StreamedModel
from ...models.structure.open_model import OpenModel
from ...system.errors import SmeltError
from ..structure.axes import Axis
from .pca import Directions, shares_of
from .taylor import first_order_of_hidden


@dataclass(frozen=True)
class HiddenFacts:
    """What a score reads.

    Attributes:
        model: the model.
        axis: its hidden channels.
        norms: the norms over them; for directions, those that read the residual stream itself.
        streamed: the model, to compute with.
        context: the run.
    """

    model: OpenModel
    axis: Axis
    norms: list[str]
    streamed: StreamedModel
    context: RunContext

    def sums(self, kinds: dict[str, Callable[[Tensor], None]], sums: list[Tensor], description: str) -> None:
        """Pass the norms' inputs on the calibration text on, and add the sums of all processes."""
        watch_norms(self.model, self.streamed, kinds, self.context, description)
        for each in sums:
            self.context.processes.sum_(each)


@dataclass(frozen=True)
class HiddenScore:
    """An importance score of the residual stream.

    Attributes:
        channels: returns one value per channel.
        directions: returns instead an orthogonal matrix, to which hidden states are rotated; its first columns are kept.
    """

    channels: Callable[[HiddenFacts], Tensor] | None = None
    directions: Callable[[HiddenFacts], Tensor] | None = None

    @property
    def rotates(self) -> bool:
        """Whether hidden states are rotated."""
        return self.directions is not None


def pca(facts: HiddenFacts) -> Tensor:
    """The principal directions (SliceGPT); see :mod:`.pca`."""
    directions = Directions(facts.axis.units)
    facts.sums(dict.fromkeys(facts.norms, directions.add), [directions.sums], "finding directions")
    if not directions.sums.isfinite().all():
        raise SmeltError("hidden states on the calibration text are not finite; use other text")
    return directions.rotation()[0]


def activation(facts: HiddenFacts) -> Tensor:
    """The sum over norms of each channel's share of their inputs' energy."""
    energies = {norm: torch.zeros(facts.axis.units, dtype=torch.float64) for norm in facts.norms}
    read = {norm: _adding(sums) for norm, sums in energies.items()}
    facts.sums(read, list(energies.values()), "measuring channels")
    return torch.stack([shares_of(sums) for sums in energies.values()]).sum(0)


def taylor(facts: HiddenFacts) -> Tensor:
    """The change of the loss from removing the channel, to first order; see :mod:`.taylor`."""
    return first_order_of_hidden(facts.streamed, facts.context)


def weight(facts: HiddenFacts) -> Tensor:
    """For each channel, its share of the squares of every matrix that reads or writes it."""
    with torch.device("cpu"):
        total = torch.zeros(facts.axis.units, dtype=torch.float64)
        for name, span in facts.axis.readers[""].items():
            tensor = facts.model.weights.load(facts.model.names[name])
            if tensor.dim() > 1:
                total += shares_of(tensor.float().square().movedim(span.dim, 0).flatten(1).sum(1, dtype=torch.float64))
        return total


# A new score is a row here, and its name in settings/hidden.py.
HIDDEN_SCORES: dict[str, HiddenScore] = {
    "pca": HiddenScore(directions=pca),
    "activation": HiddenScore(activation),
    "taylor": HiddenScore(taylor),
    "weight": HiddenScore(weight),
}


def watch_norms(
    model: OpenModel,
    streamed: StreamedModel,
    read: dict[str, Callable[[Tensor], None]],
    context: RunContext,
    description: str,
) -> None:
    """Pass on the inputs of norms on the calibration text, by full name."""
    with forward(streamed, context.processes.share(context.tokens), context.progress, description) as (store, blocks):
        for index in blocks:
            start = f"{model.anatomy.blocks[index].name}."
            with streamed.block(index) as block:
                inside = {name.removeprefix(start): add for name, add in read.items() if name.startswith(start)}
                with _hooked(block, inside):
                    streamed.run_block(index, block, store)
        outside = {name: add for name, add in read.items() if not name.startswith(f"{streamed.skeleton.blocks_name}.")}
        head = streamed.head()
        with _hooked(streamed.skeleton.model, outside):
            for batch in store.batches(LOGIT_TOKENS) if outside else ():
                head(store.read(batch))


@contextmanager
def _hooked(module: nn.Module, read: dict[str, Callable[[Tensor], None]]) -> Iterator[None]:
    with ExitStack() as hooks:
        for name, add in read.items():

            def hook(_: nn.Module, inputs: tuple[Any, ...], add: Callable[[Tensor], None] = add) -> None:
                add(inputs[0])

            hooks.callback(module.get_submodule(name).register_forward_pre_hook(hook).remove)
        yield


def _adding(sums: Tensor) -> Callable[[Tensor], None]:
    def add(hidden: Tensor) -> None:
        sums.add_(hidden.flatten(0, -2).float().square().sum(0, dtype=torch.float64).to(sums.device))

    return add
