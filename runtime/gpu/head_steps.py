"""A draft head's steps on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from ..kernels.rows.sample_tokens import SamplingState
from ..speculation.eagle.head_drafter import HeadDrafter
from .cache import GpuKeysValues
from .gpu_step import GpuStep
from .layers import GpuLayers
from .rotary_buffers import RotaryBuffers
from .sampled_steps import SampledSteps, Tokens
from .step_kinds import StepKind
from .step_tables import TableLayout


class HeadSteps(SampledSteps):
    """Steps of a draft head, at whose positions the token after each is read; the first ones of drafts, or those that go on with them.

    Args:
        drafter: whose head they are of; its layer is :class:`GpuLayers`.
        states: ``[sequences + 1, hidden]``, by slot what the last step made of the last token; the last row is for padding.
        layout, state, device, graphs: see :class:`SampledSteps`.
        logits: float32 ``[wanted, vocabulary of the model]``, room that all steps share.
        goes_on: whether they read ``states``; the first ones read what the model made of tokens.
        longest: the most tokens of a sequence.
    """

    _ahead = 1

    def __init__(
        self,
        drafter: HeadDrafter,
        states: Tensor,
        layout: TableLayout,
        state: SamplingState,
        logits: Tensor,
        device: AbstractContextManager[object],
        *,
        goes_on: bool,
        longest: int,
        graphs: bool,
    ) -> None:
        head, cache = drafter.head, drafter.store
        assert isinstance(head.stack, GpuLayers)
        assert isinstance(cache, GpuKeysValues)
        rotary = RotaryBuffers(head.rotations, head.dtype, head.device, tokens=layout.room.tokens, longest=longest)
        waits = any(one.waits for one in head.linears().values())
        super().__init__(head.stack, waits, cache, layout, state, rotary, device, head.device, graphs=graphs)
        self._head, self._states, self._room = head, states, logits
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
