"""Steps on a GPU from the device's tables to sampled tokens, replayed as CUDA graphs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...system.progress import Log
from ..decoder.model import Model
from ..decoder.parts.kv_cache import KeysValues
from ..kernels.base.precompile import precompile_work
from ..kernels.rows.sample_tokens import sample_tokens
from ..kernels.rows.sampling_state import SamplingState
from ..speculation.eagle.draft_head import DraftHead
from .cache import GpuKeysValues
from .gpu_step import GpuStep
from .layers import GpuLayers
from .rotary_buffers import RotaryBuffers
from .step_kinds import StepKind
from .step_tables import SequenceTokens, TableLayout


@dataclass(frozen=True)
class StepOutputs:
    """A step's outputs on the device, valid until the next step.

    Attributes:
        logits: ``[wanted, vocabulary]``.
        scores: float32 ``[2, wanted]``: the tokens' log probabilities, and whether logits were finite.
        chosen: int32, the tokens themselves.
    """

    logits: Tensor
    scores: Tensor
    chosen: Tensor


class Tokens(NamedTuple):
    """A step's tokens in the device's tables, padded: int32, one of each for a token.

    Attributes:
        positions: in their sequences.
        owners: the slots of these.
        slots: their places in the cache.
    """

    positions: Tensor
    owners: Tensor
    slots: Tensor


@dataclass(frozen=True)
class StepRoom:
    """What an executor's steps share.

    Attributes:
        layout: the tables that steps read.
        state: how tokens are chosen, and those of each sequence so far, to which steps add theirs.
        logits: float32 ``[wanted, vocabulary]``.
        device: in which context steps are computed.
        longest: the most tokens of a sequence.
        graphs: whether steps are captured and replayed, where that is possible.
    """

    layout: TableLayout
    state: SamplingState
    logits: Tensor
    device: AbstractContextManager[object]
    longest: int
    graphs: bool


class SampledSteps(ABC):
    """Steps that ask the host for nothing, so that they can be captured.

    Args:
        part: whose steps they are; its layers are :class:`GpuLayers`.
        cache: its keys and values.
        room: what it shares with others.
        waits: whether anything besides its linears synchronizes with the device, so that steps cannot be captured.

    Attributes:
        place: its device.
    """

    _ahead = 0  # how many of a sequence's tokens are known after the one at whose position the next is chosen

    def __init__(self, part: Model | DraftHead, cache: KeysValues, room: StepRoom, *, waits: bool = False) -> None:
        assert isinstance(part.stack, GpuLayers)
        assert isinstance(cache, GpuKeysValues)
        self._layers, self._cache, self.place = part.stack, cache, part.device
        self._layout, self._state, self._room, self._device = room.layout, room.state, room.logits, room.device
        tokens = room.layout.room.tokens
        self._rotary = RotaryBuffers(part.rotations, part.dtype, part.device, tokens=tokens, longest=room.longest)
        self._graphs: dict[StepKind, tuple[torch.cuda.CUDAGraph, StepOutputs]] = {}
        waits = waits or any(one.waits for one in part.linears().values())
        waits = waits or any(rule.waits for layer in cache.rules or () for rule in layer)
        self._captures = room.graphs and self.place.type == "cuda" and self._layers.captures and not waits
        self._pool: Any = None
        self._stream = torch.cuda.Stream(self.place) if self._captures else None

    @abstractmethod
    def _hidden(self, kind: StepKind, tokens: Tokens, step: GpuStep) -> Tensor:
        """What the last layer leaves of each token ``[tokens, hidden]``."""

    @abstractmethod
    def _logits(self, hidden: Tensor, choosers: Tensor) -> Tensor:
        """Logits ``[wanted, vocabulary]`` from the wanted tokens' hidden states and the slots of their sequences."""

    def start(self, kind: StepKind, parts: list[SequenceTokens], grows_to: list[int]) -> StepOutputs:
        """Send a step's tables, and start it.

        Args:
            kind: its shape.
            parts: its tokens.
            grows_to: how long each of their sequences may get.
        """
        self._layout.fill(parts, self._cache.block_size)
        if self._rotary.by_length:
            positions = torch.tensor([p for part in parts for p in range(part.start, part.stop)])
            lengths = [(part.count, most) for part, most in zip(parts, grows_to, strict=True)]
            self._rotary.fill(positions, lengths)
        with self._device:
            kept = self._graphs.get(kind)
            if kept is None:
                return self.body(kind)
            kept[0].replay()
            return kept[1]

    def warm_up(self, kinds: list[StepKind], log: Log) -> None:
        """Compile the kernels and capture the graphs.

        Args:
            kinds: of steps.
            log: gets messages for the user.
        """
        begun = time.monotonic()
        self._layout.fill([], self._cache.block_size)
        if self.place.type == "cuda":
            with self._device:
                precompile_work([partial(self.body, kind) for kind in kinds], log)
        for i, kind in enumerate(kinds):
            with self._device:
                self.body(kind)
                if self._captures:
                    self._capture(kind)
            if i % 5 == 4 or i + 1 == len(kinds):
                what = "captured" if self._captures else "compiled"
                log(f"{what} {i + 1} of {len(kinds)} kinds of steps, {time.monotonic() - begun:.0f} s")

    def _capture(self, kind: StepKind) -> None:
        torch.cuda.synchronize(self.place)
        graph = torch.cuda.CUDAGraph()
        # Only this thread may not wait meanwhile: another may serve a model.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            found = self.body(kind)
        self._pool = self._pool or graph.pool()
        self._graphs[kind] = (graph, found)

    def body(self, kind: StepKind) -> StepOutputs:
        """The whole step, without synchronization."""
        layout = self._layout
        tokens = Tokens(*(layout.part(name, kind.tokens) for name in Tokens._fields))
        work = layout.part("work") if kind.prompts else None
        if work is not None:
            work = work[: kind.tokens // layout.room.tokens_of_tile + kind.sequences]
        rotary = self._rotary.of(tokens.positions)
        step = GpuStep(tokens.slots, layout.runs(kind.sequences), work, kind.singles, rotary)
        hidden = self._hidden(kind, tokens, step)
        wanted, choosers, lengths = (layout.part(name, kind.wanted) for name in ("wanted", "choosers", "lengths"))
        logits = self._logits(hidden.index_select(0, wanted), choosers)
        chosen, logprobs, sound = sample_tokens(logits, choosers, lengths + self._ahead, self._state)
        return StepOutputs(logits, torch.stack([logprobs, sound.float()]), chosen)


class ModelSteps(SampledSteps):
    """A model's."""

    def __init__(self, model: Model, cache: KeysValues, room: StepRoom) -> None:
        super().__init__(model, cache, room, waits=model.aux is not None and model.aux.waits)
        self._model = model

    def _hidden(self, kind: StepKind, tokens: Tokens, step: GpuStep) -> Tensor:
        model, history = self._model, self._state.history
        ids = history[tokens.owners, tokens.positions]
        if kind.drafts:
            drafts = self._layout.part("drafts", kind.tokens)
            ids = torch.where(drafts < 0, ids, drafts)
            # What is chosen after a draft token depends on it, too; where another one is chosen, that replaces it.
            history.index_put_((tokens.owners, tokens.positions), ids)
        hidden = model.embed(ids, tokens.positions)
        if model.aux is not None:
            model.aux.begin(hidden)
        hidden = self._layers.run(hidden, step, self._cache, model.aux)
        if model.aux is not None:
            model.aux.finish(len(model.layers), hidden, step.slots)
        return hidden

    def _logits(self, hidden: Tensor, choosers: Tensor) -> Tensor:
        return self._model.head(hidden, self._room[: len(hidden)])
