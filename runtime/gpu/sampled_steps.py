"""A model's steps on a GPU, from the device's tables to sampled tokens, replayed as CUDA graphs."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...system.progress import Log
from ..decoder.model import Model
from ..kernels.base.precompile import precompile_work
from ..kernels.rows.sample_tokens import SamplingState, sample_tokens
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


class SampledSteps:
    """Steps of one model that ask the host for nothing, so that they can be captured.

    Args:
        model: the model; its layers are :class:`GpuLayers`.
        cache: its keys and values.
        layout: the tables that its steps read; several models may share them.
        state: how tokens are chosen, and those of each sequence so far, to which steps add theirs.
        logits: float32 ``[wanted, vocabulary]``, room that all steps share.
        device: in which context steps are computed.
        longest: the most tokens of a sequence.
        graphs: whether steps are captured and replayed, where that is possible.
    """

    def __init__(
        self,
        model: Model,
        cache: GpuKeysValues,
        layout: TableLayout,
        state: SamplingState,
        logits: Tensor,
        device: AbstractContextManager[object],
        *,
        longest: int,
        graphs: bool,
    ) -> None:
        assert isinstance(model.stack, GpuLayers)
        self._model, self._cache, self._layers = model, cache, model.stack
        self._layout, self._state, self._logits = layout, state, logits
        self._device, self._place = device, model.device
        self._rotary = RotaryBuffers(model, layout.room.tokens, longest)
        self._graphs: dict[StepKind, tuple[torch.cuda.CUDAGraph, StepOutputs]] = {}
        rules = [rule for layer in cache.rules or () for rule in layer]
        self._captures = graphs and self._place.type == "cuda" and self._layers.captures
        self._captures = self._captures and not any(rule.waits for rule in rules)
        self._captures = self._captures and not any(one.waits for one in model.linears().values())
        self._pool: Any = None
        self._stream = torch.cuda.Stream(self._place) if self._captures else None

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
        if self._place.type == "cuda":
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
        torch.cuda.synchronize(self._place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            found = self.body(kind)
        self._pool = self._pool or graph.pool()
        self._graphs[kind] = (graph, found)

    def body(self, kind: StepKind) -> StepOutputs:
        """The whole step, without synchronization."""
        layout, model = self._layout, self._model
        tokens, sequences = kind.tokens, kind.sequences
        positions, owners = layout.part("positions", tokens), layout.part("owners", tokens)
        history = self._state.history
        ids = history[owners, positions]
        if kind.drafts:
            drafts = layout.part("drafts", tokens)
            ids = torch.where(drafts < 0, ids, drafts)
            # What is chosen after a draft token depends on it, too; where another one is chosen, that replaces it.
            history.index_put_((owners, positions), ids)
        work = layout.part("work") if kind.prompts else None
        if work is not None:
            work = work[: tokens // layout.room.tokens_of_tile + sequences]
        step = GpuStep(
            layout.part("slots", tokens),
            layout.runs(sequences),
            work,
            kind.singles,
            self._rotary.of(positions),
        )
        hidden = model.embed(ids, positions)
        if model.aux is not None:
            model.aux.begin(hidden)
        hidden = self._layers.run(hidden, step, self._cache, model.aux)
        if model.aux is not None:
            model.aux.finish(len(model.layers), hidden, step.slots)
        # Shared by all graphs.
        wanted, choosers, lengths = (layout.part(name, kind.wanted) for name in ("wanted", "choosers", "lengths"))
        logits = model.head(hidden.index_select(0, wanted), self._logits[: kind.wanted])
        chosen, logprobs, sound = sample_tokens(logits, choosers, lengths, self._state)
        return StepOutputs(logits, torch.stack([logprobs, sound.float()]), chosen)
