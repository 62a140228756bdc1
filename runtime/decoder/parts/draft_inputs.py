"""What a draft head (EAGLE-3) reads: states between a model's layers, and tokens beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Where keys and values of a step's tokens go, further places ``(rows, slots)`` if there are any, and the states.
StatesSink = Callable[[Tensor, tuple[Tensor, Tensor] | None, Tensor], None]

_NOTHING = torch.empty(0)


class AuxStates:
    """Hidden states that a model leaves between its layers, of every token that it computes.

    Args:
        after: after how many layers, each; the number of all layers stands for what the last one leaves.
        store: the keys and values that these tokens have; steps with others leave none.
        sink: gets a step's states ``[tokens, len(after) x hidden]``, and the cache slots of its tokens.
        waits: whether the sink synchronizes with the device, so that no graph can have it.

    Attributes:
        waits: the same.
    """

    def __init__(self, after: Sequence[int], store: Any, sink: StatesSink, *, waits: bool) -> None:
        self._after, self._store, self._sink = tuple(after), store, sink
        self.waits = waits
        self._states = _NOTHING

    def belongs(self, store: Any) -> bool:
        """Whether a step with these keys and values leaves states."""
        return store is self._store

    def begin(self, hidden: Tensor) -> None:
        """A step of as many tokens begins."""
        self._states = hidden.new_empty(hidden.shape[0], len(self._after) * hidden.shape[1])

    def wants(self, layers: int) -> bool:
        """Whether the states after so many layers are of use."""
        return layers in self._after

    def take(self, layers: int, hidden: Tensor) -> None:
        """Copy the states after so many layers, if they are of use."""
        for place in self._places(layers):
            place.copy_(hidden)

    def addresses(self, layers: int) -> tuple[list[tuple[int, int]], int]:
        """Where kernels copy the states to: ``(after how many layers, address)`` of those before the last of ``layers``, and elements from row to row."""
        first, size, row = self._states.data_ptr(), self._states.element_size(), self._states.shape[1]
        apart = row // len(self._after) * size
        return sorted((count, first + i * apart) for i, count in enumerate(self._after) if count < layers), row

    def finish(self, layers: int, hidden: Tensor, slots: Tensor, also: tuple[Tensor, Tensor] | None = None) -> None:
        """Give the step's states away.

        Args:
            layers: how many there are.
            hidden: what the last one left.
            slots: of its tokens; negative for padding.
            also: further places of some, as :class:`.batch.Batch` has them.
        """
        self.give(self.taken(layers, hidden), slots, also)

    def taken(self, layers: int, hidden: Tensor) -> Tensor:
        """The step's states, which has ended with ``hidden`` after so many layers."""
        if self.wants(layers):
            self.take(layers, hidden)
        states, self._states = self._states, _NOTHING
        return states

    def give(self, states: Tensor, slots: Tensor, also: tuple[Tensor, Tensor] | None) -> None:
        """Give states to the sink."""
        self._sink(slots, also, states)

    def _places(self, layers: int) -> list[Tensor]:
        width = self._states.shape[1] // len(self._after)
        return [self._states[:, i * width : (i + 1) * width] for i, count in enumerate(self._after) if count == layers]


class JoinedInputs:
    """The norm before a draft head's attention, which also reads the tokens' embeddings.

    Args:
        norm: of the states.

    Attributes:
        tokens: the step's embeddings, normed ``[tokens, hidden]``.
    """

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        self._norm = norm
        self.tokens = torch.empty(0)

    def __call__(self, hidden: Tensor) -> Tensor:
        """From states ``[tokens, hidden]`` to ``[tokens, 2 hidden]``."""
        return torch.cat([self.tokens, self._norm(hidden)], -1)
