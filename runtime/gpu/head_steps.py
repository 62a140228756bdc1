"""A draft head's steps on a GPU."""

from __future__ import annotations

from torch import Tensor

from ..speculation.eagle.head_drafter import HeadDrafter
from .gpu_step import GpuStep
from .sampled_steps import SampledSteps, StepRoom, Tokens
from .step_kinds import StepKind


class HeadSteps(SampledSteps):
    """Steps of a draft head, at whose positions the token after each is read; the first ones of drafts, or those that go on with them.

    Args:
        drafter: whose head they are of; its layer is :class:`GpuLayers`.
        room: see :class:`SampledSteps`.
        states: ``[sequences + 1, hidden]``, by slot what the last step made of the last token; the last row is for padding.
        goes_on: whether they read ``states``; the first ones read what the model made of tokens.
    """

    _ahead = 1

    def __init__(self, drafter: HeadDrafter, room: StepRoom, states: Tensor, *, goes_on: bool) -> None:
        head = drafter.head
        super().__init__(head, drafter.store, room)
        self._head, self._states = head, states
        self._features = None if goes_on else drafter.features
        self._tokens = None if head.tokens is None else head.tokens.to(head.device)

    def _hidden(self, kind: StepKind, tokens: Tokens, step: GpuStep) -> Tensor:
        read = self._states[tokens.owners] if self._features is None else self._features.read(tokens.slots)
        ids = self._state.history[tokens.owners, tokens.positions + 1]
        return self._layers.run(self._head.begin(ids, read), step, self._cache)

    def _logits(self, hidden: Tensor, choosers: Tensor) -> Tensor:
        room = self._room[: len(hidden)]
        logits, states = self._head.end(hidden, room if self._tokens is None else None)
        self._states.index_put_((choosers.long(),), states)
        if self._tokens is None:
            return logits
        return room.fill_(float("-inf")).index_copy_(1, self._tokens, logits)
