"""Steps on a GPU: laid out while the one before still runs, replayed as graphs, their tokens chosen on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..executor import Flight, Landed, StepResult, TorchExecutor
from ..kernels.rotate_and_store import Turns
from ..kernels.sample_tokens import Choices, choices, sample_tokens
from ..keys_values import KeysValues
from ..model import Model
from ..sampling import Sampled, sequence_seed
from ..scheduler import Chunk, StepPlan
from ..sequence import Request, Sequence
from .cache import GpuKeysValues
from .layers import GpuLayers
from .step import GpuStep
from .tables import Layout, Part, Room

_EDITS = 64  # of logits, that a request may ask of the device
_ALWAYS = 2**31 - 1
_FEW = (1, 2, 4, 8)


class GpuExecutor(TorchExecutor):
    """Like :class:`TorchExecutor`; steps whose tokens are chosen on the device are only started, not waited for.

    Args:
        model, store, ends, seed: see there.
        max_sequences, token_budget, max_length: the most that a step and a sequence may have.
        graphs: whether steps are captured and replayed.
    """

    def __init__(
        self,
        model: Model,
        store: KeysValues,
        ends: frozenset[int],
        seed: int,
        *,
        max_sequences: int,
        token_budget: int,
        max_length: int,
        graphs: bool,
    ) -> None:
        super().__init__(model, store, ends, seed)
        assert isinstance(store, GpuKeysValues)
        assert isinstance(model.stack, GpuLayers)
        self._decoder, self._cache, self._layers = model, store, model.stack
        self._place = model.device
        blocks = -(-max_length // store.block_size)
        room = Room(max(token_budget, max_sequences), max_sequences, blocks, self._layers.tokens_of_tile(store))
        self._layout = Layout(room, self._place)
        self._choices: Choices = choices(max_sequences, _EDITS, max_length, self._place)
        self._slots: dict[Sequence, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}
        self._turns = _Turning(model, room.tokens, max_length)
        self._graphs: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, _Found]] = {}
        self._captures = graphs and self._place.type == "cuda" and self._layers.captures
        self._pool: Any = None

    def runs_ahead(self, request: Request) -> bool:
        """Whether all of it can be chosen on the device."""
        params = request.params
        plain = params.n == 1 and not params.is_beam_search and params.prompt_logprobs is None
        scored = any(sequence.expected for sequence in request.sequences)
        return plain and not scored and len(_edits(request, self._ends)) <= _EDITS

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Start a step; or carry it out, if some request must be looked at on the host."""
        self._release()
        if not all(self.runs_ahead(chunk.sequence.request) for chunk in plan.chunks):
            result = self.execute(plan)
            self._tell(result)
            return Landed(result)
        with self._device:
            self._store.copy(plan.copies)
            parts = [self._part(chunk) for chunk in plan.chunks]
            self._layout.fill(parts, self._cache.block_size)
            tokens = self._bucket(sum(part.count for part in parts), self._layout.room.tokens)
            sequences = self._bucket(len(parts), self._layout.room.sequences)
            mixed = any(part.count > 1 for part in parts)
            if self._turns.by_length:
                lengths = [(chunk.count, chunk.sequence.request.grows_to) for chunk in plan.chunks]
                self._turns.fill(self._layout.part("positions", sum(part.count for part in parts)), lengths)
            found = self._run(max(tokens, sequences), sequences, mixed)
            return _InFlight(plan, found.sent(plan))

    def warm_up(self, told: Callable[[str], object]) -> None:
        """Compile what steps need, and capture them.

        Args:
            told: hears how far it is.
        """
        begun = time.monotonic()
        room = self._layout.room
        kinds = []
        for sequences in _buckets(room.sequences):
            kinds.append((sequences, sequences, False))
        for tokens in _buckets(room.tokens):
            if tokens > 1:
                kinds.append((max(tokens, room.sequences), room.sequences, True))
        kinds = sorted(set(kinds), reverse=True)  # the largest first, so that the others find its memory
        with self._device, torch.inference_mode():
            self._layout.fill([], self._cache.block_size)
            for i, kind in enumerate(kinds):
                self._body(*kind)
                if self._captures:
                    self._capture(kind)
                if i % 5 == 4 or i + 1 == len(kinds):
                    what = "captured" if self._captures else "compiled"
                    told(f"{what} {i + 1} of {len(kinds)} kinds of steps, {time.monotonic() - begun:.0f} s")

    def _run(self, tokens: int, sequences: int, mixed: bool) -> _Found:
        if self._captures and mixed:
            sequences = self._layout.room.sequences
            tokens = max(tokens, sequences)
        kept = self._graphs.get((tokens, sequences, mixed))
        if kept is None:
            return self._body(tokens, sequences, mixed)
        kept[0].replay()
        return kept[1]

    def _capture(self, kind: tuple[int, int, bool]) -> None:
        torch.cuda.synchronize(self._place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = self._body(*kind)
        self._pool = self._pool or graph.pool()
        self._graphs[kind] = (graph, found)

    def _body(self, tokens: int, sequences: int, mixed: bool) -> _Found:
        """The whole step, from the device's own lists to the chosen tokens; nothing waits for the host."""
        layout, model = self._layout, self._decoder
        positions = layout.part("positions", tokens)
        ids = self._choices.history[layout.part("owners", tokens), positions]
        work = layout.part("work") if mixed else None
        if work is not None:
            work = work[: tokens // layout.room.tokens_of_tile + sequences]
        step = GpuStep(
            layout.part("slots", tokens),
            layout.runs(sequences),
            work,
            True,
            self._turns.of(positions),
        )
        hidden = self._layers.run(model.embed(ids, positions), step, self._cache)
        logits = model.head(hidden.index_select(0, layout.part("wanted", sequences)))
        chosen, logprobs, sound = sample_tokens(
            logits, layout.part("choosers", sequences), layout.part("lengths", sequences), self._choices
        )
        return _Found(logits, torch.stack([chosen.float(), logprobs, sound.float()]), chosen)

    @staticmethod
    def _bucket(count: int, most: int) -> int:
        """The next size that steps come in."""
        return next((size for size in _buckets(most) if size >= count), most)

    def _release(self) -> None:
        """Take back the slots of sequences that ended, or gave way."""
        for sequence, slot in list(self._slots.items()):
            if sequence.finish is not None or sequence.blocks is not self._blocks[slot] or not sequence.blocks:
                del self._slots[sequence], self._blocks[slot]
                self._free.append(slot)

    def _part(self, chunk: Chunk) -> Part:
        sequence = chunk.sequence
        slot = self._slots.get(sequence)
        fresh = slot is None
        if slot is None:
            slot = self._free.pop()
            self._slots[sequence], self._blocks[slot] = slot, sequence.blocks
            self._introduce(sequence, slot)
        return Part(chunk.start, chunk.count, list(sequence.blocks), slot, chunk.is_last, fresh)

    def _introduce(self, sequence: Sequence, slot: int) -> None:
        """Tell the device what a sequence has, and how it chooses."""
        params, known = sequence.request.params, self._choices
        tokens = torch.tensor(sequence.tokens, dtype=torch.int32)
        known.history[slot, : len(tokens)].copy_(self._sent(tokens), non_blocking=True)
        edits = _edits(sequence.request, self._ends)
        of_edits = torch.zeros(3, _EDITS, dtype=torch.float64)
        for i, (token, value, until) in enumerate(edits):
            of_edits[:, i] = torch.tensor([token, value, until], dtype=torch.float64)
        known.edit_tokens[slot].copy_(self._sent(of_edits[0].int()), non_blocking=True)
        known.edit_values[slot].copy_(self._sent(of_edits[1].float()), non_blocking=True)
        known.edit_until[slot].copy_(self._sent(of_edits[2].int()), non_blocking=True)
        for name, value in (
            ("prompt_lengths", len(sequence.request.prompt)),
            ("temperature", params.temperature),
            ("top_k", max(params.top_k, 0)),
            ("top_p", params.top_p),
            ("min_p", params.min_p),
            ("repetition", params.repetition_penalty),
            ("presence", params.presence_penalty),
            ("frequency", params.frequency_penalty),
            ("seeds", sequence_seed(sequence, self._seed)),
            ("edit_counts", len(edits)),
        ):
            getattr(known, name)[slot] = value

    def _sent(self, tensor: Tensor) -> Tensor:
        """In memory that travels while the host goes on."""
        return tensor.cpu().pin_memory() if self._place.type == "cuda" else tensor

    def _tell(self, result: StepResult) -> None:
        """Let the device know tokens that the host has chosen."""
        for sequence, sampled in result.tokens.items():
            slot = self._slots.get(sequence)
            if slot is not None and len(sequence.tokens) < self._choices.history.shape[1]:
                self._choices.history[slot, len(sequence.tokens)] = sampled.token


@dataclass(frozen=True)
class _Found:
    """What a step leaves on the device.

    Attributes:
        logits: ``[sequences, vocabulary]``.
        scores: float32 ``[3, sequences]``: tokens, their log probabilities, and whether logits were numbers.
        chosen: int32, the tokens themselves.
    """

    logits: Tensor
    scores: Tensor
    chosen: Tensor

    def sent(self, plan: StepPlan) -> _Sent:
        """On its way to the host."""
        asked = ((i, chunk.sequence.request.params.logprobs) for i, chunk in enumerate(plan.chunks) if chunk.is_last)
        wanting = {i: count for i, count in asked if count is not None}
        best = None
        if wanting:
            values, tokens = self.logits[list(wanting)].log_softmax(-1).topk(max(1, *wanting.values()))
            best = (_host(values), _host(tokens))
        sent = _Sent(_host(self.scores), _host(self.chosen), wanting, best, None)
        if self.scores.device.type != "cuda":
            return sent
        event = torch.cuda.Event()
        event.record()
        return _Sent(sent.scores, sent.chosen, wanting, best, event)


@dataclass(frozen=True)
class _Sent:
    scores: Tensor
    chosen: Tensor
    wanting: dict[int, int]
    best: tuple[Tensor, Tensor] | None
    event: torch.cuda.Event | None


def _host(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there once the stream has come so far."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu").copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class _InFlight:
    """A step on its way."""

    plan: StepPlan
    sent: _Sent
    settled: bool = False

    def result(self) -> StepResult:
        """What it found; waits for the device."""
        if self.sent.event is not None:
            self.sent.event.synchronize()
        _, logprobs, sound = self.sent.scores.tolist()
        tokens = self.sent.chosen.tolist()
        rows = {row: i for i, row in enumerate(self.sent.wanting)}
        result = StepResult()
        for i, chunk in enumerate(self.plan.chunks):
            if not sound[i] and chunk.is_last:
                result.broken.append(chunk.sequence)
            elif chunk.is_last:
                top = None
                if i in rows and self.sent.best is not None:
                    count = self.sent.wanting[i]
                    values, best = (part[rows[i], :count].tolist() for part in self.sent.best)
                    top = dict(zip(best, values, strict=True))
                    top.setdefault(tokens[i], logprobs[i])
                result.tokens[chunk.sequence] = Sampled(tokens[i], logprobs[i], top)
        return result


class _Turning:
    """Rotary positions for steps: tables of all positions, or of a step's own where frequencies change with the length."""

    def __init__(self, model: Model, tokens: int, longest: int) -> None:
        self._rotations = model.rotations
        self.by_length = model.rotations.by_length
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        with model.device:
            if not self.by_length:
                self._tables = {name: _flat(turn) for name, turn in model.rotations.tables(longest).items()}
                return
            probe = model.rotations.of(torch.zeros(1, dtype=torch.int64), [(1, 1)])
            for name, (cosine, _) in probe.items():
                shape = (tokens, cosine.shape[-1])
                self._tables[name] = (torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype))
            self._each = torch.arange(tokens, dtype=torch.int32)

    def fill(self, positions: Tensor, lengths: list[tuple[int, int]]) -> None:
        """Compute a step's own."""
        for name, turn in self._rotations.of(positions, lengths).items():
            for kept, new in zip(self._tables[name], _flat(turn), strict=True):
                kept[: len(new)] = new

    def of(self, positions: Tensor) -> dict[str, Turns]:
        """A step's."""
        rows = self._each[: len(positions)] if self.by_length else positions
        return {name: Turns(cosine, sine, rows) for name, (cosine, sine) in self._tables.items()}


def _flat(turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return turn[0].flatten(1).contiguous(), turn[1].flatten(1).contiguous()


def _buckets(most: int) -> list[int]:
    """Sizes that steps come in: they double, and grow by at most 32."""
    found = [size for size in _FEW if size < most]
    size = 16
    while size < most:
        found.append(size)
        size += min(size, 32) if size < 128 else size // 2
    return [*found, most]


def _edits(request: Request, ends: frozenset[int]) -> list[tuple[int, float, int]]:
    """What is added to which logit until which length."""
    params = request.params
    found = [(token, float(bias), _ALWAYS) for token, bias in params.logit_bias.items()]
    if params.min_tokens:
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
        until = len(request.prompt) + params.min_tokens
        found += [(token, float("-inf"), until) for token in sorted(stops)]
    return found
