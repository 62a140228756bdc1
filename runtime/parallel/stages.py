"""Pipeline stages: which layers a rank has, and how hidden states go from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...system.errors import RuntimeProblem
from .ranks import ConnectedRanks, Ranks, lost


class Stages:
    """The stages as one of them sees them; by itself, one that has all layers.

    Attributes:
        index: its number.
        count: how many there are.
    """

    index = 0
    count = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding, and gets the result."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1

    @property
    def gets_result(self) -> bool:
        """Whether this rank samples: the first of the first stage."""
        return True

    def layers(self, total: int) -> range:
        """Its layers.

        Raises:
            RuntimeProblem: there are fewer layers than stages.
        """
        if total < self.count:
            raise RuntimeProblem(f"{total} layers cannot be divided between {self.count} stages; use a lower pp")
        return self.layers_of(self.index, total)

    def layers_of(self, index: int, total: int) -> range:
        """A stage's layers, of so many."""
        return range(total * index // self.count, total * (index + 1) // self.count)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Hidden states from the stage before; from the last one, the first gets the result: logits, or states."""
        raise NotImplementedError

    def send(self, tensor: Tensor) -> None:
        """Hidden states to the next stage, without waiting for it; the result, from the last to the first."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until all was sent."""


class OnlyHead(Stages):
    """A last stage without layers, by itself."""

    index = 1
    count = 2

    def layers(self, total: int) -> range:
        return range(total, total)


class ConnectedStages(Stages):
    """One of several.

    Args:
        world: all ranks; those of a stage have neighbouring numbers.
        index: the stage's number.
        count: how many there are.
    """

    def __init__(self, world: ConnectedRanks, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._world = world
        self._each = world.count // count
        self._sent: list[tuple[Tensor, Any]] = []

    @property
    def gets_result(self) -> bool:
        return self._world.rank == 0

    @property
    def sends_result(self) -> bool:
        """Whether this rank of the last stage, whose ranks all have it, sends the result."""
        return self._world.rank == self._world.count - self._each

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        source = self._world.rank - self._each if not self.is_first else self._world.count - self._each
        with lost():
            self._world.wait(self._world.tensors.recv([tensor], source, 0))
        return tensor

    def send(self, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        target = 0 if self.is_last else self._world.rank + self._each
        with lost():
            self._sent.append((tensor, self._world.tensors.send([tensor], target, 0)))

    def wait(self) -> None:
        sent, self._sent = self._sent, []
        with lost():
            for _, work in sent:
                self._world.wait(work)


@dataclass(frozen=True)
class RankPlace:
    """A rank's part in a model.

    Attributes:
        world: all ranks.
        ranks: those that divide each layer with it.
        stages: that have the other layers.
        context: the ring of those that have other parts of each sequence.
    """

    world: Ranks = field(default_factory=Ranks)
    ranks: Ranks = field(default_factory=Ranks)
    stages: Stages = field(default_factory=Stages)
    context: Ranks = field(default_factory=Ranks)


def divided(world: Ranks, tp: int, pp: int = 1, cp: int = 1) -> RankPlace:
    """A rank's place. All ranks call it.

    Args:
        world: all ranks: the product of the others.
        tp: how many divide each layer; these have neighbouring numbers.
        pp: how many stages there are.
        cp: how many divide each sequence; one, if there are several stages.
    """
    if pp == cp == 1 or not isinstance(world, ConnectedRanks):
        return RankPlace(world, world)
    group, member = divmod(world.rank, tp)
    tensor = Ranks() if tp == 1 else world.part_of(f"group {group}", member, tp)
    if pp > 1:
        return RankPlace(world, tensor, ConnectedStages(world, group, pp))
    return RankPlace(world, tensor, context=world.part_of(f"ring {member}", group, cp))
