"""The states that a draft head reads, from the pipeline's stages that make them to the first rank, which has the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.stages import Stages
from ..parts.batch import Batch
from ..parts.draft_inputs import AuxStates, StatesSink


class StagedStates:
    """A stage's part in them.

    The first stage keeps its own; those of others go from stage to stage beside the hidden states, and from the last one to the
    first rank.

    Args:
        after: after how many of the model's layers, as :class:`..parts.draft_inputs.AuxStates` has it.
        total: how many layers the model has.
        stages: all of them.
        store: the keys and values that these tokens have on this stage; steps with others leave no states.
        sink: gets all states of a step on the first rank, and is called nowhere else.
        waits: whether it synchronizes with the device.

    Attributes:
        own: takes those of this stage's layers; None if there are none.
        arriving: how many the stages between the first and this one make of a token.
        collected: how many the last one sends.
    """

    def __init__(
        self, after: Sequence[int], total: int, stages: Stages, store: Any, sink: StatesSink, *, waits: bool
    ) -> None:
        self._store, self._sink = store, sink
        self._taken: list[Tensor] = []
        last_layers = [stages.layers_of(index, total).stop for index in range(stages.count)]
        # A stage leaves what its layers make of their inputs; the first one these, too.
        made = [next(i for i, stop in enumerate(last_layers) if count <= stop) for count in after]
        places = [[place for place, stage in enumerate(made) if stage == index] for index in range(stages.count)]
        self.arriving = sum(map(len, places[1 : stages.index]))
        self.collected = sum(map(len, places[1:]))
        self._order = [place for stage in places for place in stage]
        mine = [after[place] - stages.layers(total).start for place in places[stages.index]]
        self.own = (
            AuxStates(mine, store, lambda _, __, states: self._taken.append(states), waits=waits) if mine else None
        )

    def belongs(self, store: Any) -> bool:
        """Whether a step with these keys and values leaves states."""
        return store is self._store

    def begin(self) -> None:
        """A step begins; one before may have ended early."""
        self._taken.clear()

    def passed_on(self, arrived: Tensor) -> Tensor:
        """What goes on from a stage but the first: what has arrived there of a piece's tokens, and its own."""
        return arrived if self.own is None else torch.cat([arrived, self._taken.pop()], 1)

    def finish(self, batch: Batch, others: Tensor) -> None:
        """On the first rank, which has kept its own.

        Args:
            batch: all of the step.
            others: the other stages', ``[tokens, collected x hidden]``.
        """
        own = [torch.cat(self._taken)] if self._taken else []
        self._taken.clear()
        states = torch.cat([*own, others.to(own[0])] if own else [others], 1).view(len(others), len(self._order), -1)
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        in_order = states if back == sorted(back) else states[:, torch.tensor(back, device=states.device)]
        self._sink(batch.slots, batch.also, in_order.flatten(1))
