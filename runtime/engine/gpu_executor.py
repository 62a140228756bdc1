"""Steps on a GPU: prepared while the previous one runs, replayed as CUDA graphs, with sampling on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...system.progress import Log
from ..decoder.kv_cache import KeysValues
from ..decoder.logit_statistics import LogitStatistics
from ..decoder.model import Model
from ..gpu.cache import GpuKeysValues
from ..gpu.gpu_step import GpuStep
from ..gpu.layers import GpuLayers
from ..gpu.step_tables import Room, SequenceTokens, TableLayout
from ..kernels.base.precompile import precompile_work
from ..kernels.base.targets import target_of
from ..kernels.rows.rotate_and_store import RotaryTables
from ..kernels.rows.sample_tokens import SamplingState, choices, sample_tokens
from ..requests.noise import PhiloxNoise
from ..requests.params import SamplingParams
from ..requests.sequence import Request, Sequence, TokenLogprobs
from ..sampling.sampling import Sampled, sequence_seed, top_logprobs
from ..scheduling.plan import Chunk, StepPlan
from ..speculation.counts import DraftOutcome
from ..speculation.drafter import Drafter, Drafts
from ..speculation.length import Drafted
from ..speculation.verification import VerifiedChain
from .executor import CompletedStep, RunsBatches, StepHandle, StepResult
from .host_blocks import HostBlocks
from .torch_executor import TorchExecutor

_EDITS = 64  # of logits, per request on the device
_ALWAYS = 2**31 - 1
_FEW = (1, 2, 4, 8)
# Tokens of a step that is captured only once, with the largest number of sequences, some with one token: the wasted work
# is small compared to a long step's products.
_LONG = 512
# Tokens of a step in which drafts are verified, one of those that steps are padded to. Each has a row of logits, so in longer ones, with
# prompts, lm_head would compute many that nobody wants, or more kinds of steps were needed.
_VERIFIED = 288


class StepKind(NamedTuple):
    """The shape of a step; steps of one kind share a captured graph.

    Attributes:
        tokens, sequences: the capacity.
        prompts, singles: whether some sequences have several tokens, and whether some have one.
        drafts: after how many tokens one is sampled, if some of them are drafts; 0 for one for each sequence.
    """

    tokens: int
    sequences: int
    prompts: bool
    singles: bool
    drafts: int = 0

    @property
    def wanted(self) -> int:
        """After how many tokens one is sampled."""
        return self.drafts or self.sequences


class GpuExecutor(TorchExecutor):
    """Like :class:`TorchExecutor`; steps with sampling on the device run asynchronously, unless tokens are drafted from theirs.

    Args:
        model, store, ends, seed, host, drafter, upper: as there.
        max_sequences, token_budget, max_length: the limits of a step and of a sequence.
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
        host: HostBlocks | None = None,
        drafter: Drafter | None = None,
        upper: RunsBatches | None = None,
    ) -> None:
        super().__init__(model, store, ends, seed, host, drafter=drafter, upper=upper)
        assert isinstance(store, GpuKeysValues)
        assert isinstance(model.stack, GpuLayers)
        self._decoder, self._cache, self._layers = model, store, model.stack
        self._place = model.device
        blocks = -(-max_length // store.block_size)
        of_tile = self._layers.tokens_of_tile(store)
        tokens = max(token_budget, max_sequences)
        drafted = max((size for size in buckets(tokens) if size <= _VERIFIED), default=0) if drafter else 0
        room = Room(tokens, max_sequences, blocks, of_tile, drafted)
        self._layout = TableLayout(room, self._place)
        self._choices: SamplingState = choices(max_sequences, _EDITS, max_length, self._place)
        self._slots: dict[Sequence, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}
        self._rotary = _RotaryBuffers(model, room.tokens, max_length)
        self._graphs: dict[StepKind, tuple[torch.cuda.CUDAGraph, _StepOutputs]] = {}
        rules = [rule for layer in store.rules or () for rule in layer]
        self._captures = graphs and self._place.type == "cuda" and self._layers.captures
        self._captures = self._captures and not any(rule.waits for rule in rules)
        self._captures = self._captures and not any(one.waits for one in model.linears().values())
        self._pool: Any = None
        self._stream = torch.cuda.Stream(self._place) if self._captures else None
        self._current = torch.cuda.device(self._place) if self._place.type == "cuda" else nullcontext()
        self._stale: set[int] = set()  # slots whose blocks on the device are outdated
        self._sees_stores = target_of(self._place).splits
        self._logits = torch.empty(room.wanted, model.spec.vocabulary, dtype=torch.float32, device=self._place)

    def runs_ahead(self, request: Request) -> bool:
        """Whether all its tokens can be sampled on the device, and none of them is needed to draft the next ones."""
        return self._drafter is None and self._samples(request)

    def _samples(self, request: Request) -> bool:
        """Whether all its tokens can be sampled on the device."""
        if request.upper_bits:
            return False
        params = request.params
        plain = params.n == 1 and not params.is_beam_search and params.prompt_logprobs is None
        plain = plain and params.constraint is None
        if not plain or any(sequence.expected for sequence in request.sequences):
            return False
        edits = len(_edits(request, self._ends))
        # Where a barrier does not make stores visible, logits cannot be changed or filtered in memory.
        return edits <= _EDITS and (self._sees_stores or not (edits or _is_changed(params)))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepHandle:
        """Start a step, or run it synchronously if some request needs the host, or a drafter its tokens."""
        self._release()
        self._make_slots(plan)
        for chunk in plan.chunks:
            for sequence in _sampled(chunk):
                if sequence.noise is None:  # the same tokens, wherever they are chosen
                    sequence.noise = PhiloxNoise(sequence_seed(sequence, self._seed), sequence.tokens)
        if any(chunk.spare or not self._samples(chunk.sequence.request) for chunk in plan.chunks):
            result = self._compute(plan)
            # They may have more blocks by now.
            self._stale.update(self._slots[c.sequence] for c in plan.chunks if c.sequence in self._slots)
            for sequence in () if result.drafted is None else result.drafted.of:
                self._forget(sequence)  # the device does not know what it got
            return CompletedStep(result)
        with self._current:
            self._move_blocks(plan)
            if self._drafter is None:
                return self._start(plan, [()] * len(plan.chunks))
            begun = time.perf_counter()
            proposed = self._drafter.propose(plan)
            drafted = time.perf_counter()
            drafts = [_chain_of(proposed, chunk) for chunk in plan.chunks]
            if sum(chunk.count for chunk in plan.chunks) + sum(map(len, drafts)) > self._layout.room.drafted:
                drafts = [[] for _ in drafts]  # beside a long prompt: see _VERIFIED
            result, verified = self._start(plan, drafts).with_outcomes()
            drafting = drafted - begun - proposed.preparing
            result.drafted = Drafted(verified, drafting, proposed.prepared, proposed.preparing)
            return CompletedStep(result)

    def _start(self, plan: StepPlan, drafts: SequenceOf[SequenceOf[int]]) -> _LaunchedStep:
        """Start a step whose tokens are sampled on the device."""
        parts = [self._part(chunk, draft) for chunk, draft in zip(plan.chunks, drafts, strict=True)]
        self._layout.fill(parts, self._cache.block_size)
        if self._rotary.by_length:
            positions = torch.tensor([p for part in parts for p in range(part.start, part.stop)])
            grows = [(p.count, c.sequence.request.grows_to) for p, c in zip(parts, plan.chunks, strict=True)]
            self._rotary.fill(positions, grows)
        counts = [part.count for part in parts]
        kind = self._kind(sum(counts), counts, drafts=any(drafts))
        with self._device:
            found = self._run(kind)
        return _LaunchedStep(plan, drafts, found.sent(plan, drafts))

    def warm_up(self, log: Log) -> None:
        """Compile the kernels and capture the graphs.

        Args:
            log: gets messages for the user.
        """
        begun = time.monotonic()
        kinds = self._kinds()
        with self._current, torch.inference_mode():
            self._layout.fill([], self._cache.block_size)
            if self._place.type == "cuda":
                with self._device:
                    precompile_work([partial(self._body, kind) for kind in kinds], log)
            for i, kind in enumerate(kinds):
                with self._device:
                    self._body(kind)
                    if self._captures:
                        self._capture(kind)
                if i % 5 == 4 or i + 1 == len(kinds):
                    what = "captured" if self._captures else "compiled"
                    log(f"{what} {i + 1} of {len(kinds)} kinds of steps, {time.monotonic() - begun:.0f} s")

    def _kinds(self) -> list[StepKind]:
        """The kinds of steps to capture, the largest first."""
        room = self._layout.room
        singles = [StepKind(count, count, False, True) for count in buckets(room.sequences)]
        prompts = [
            StepKind(tokens, sequences, True, too)
            for tokens in buckets(room.tokens)
            if tokens > 1
            for sequences in {room.sequences if tokens > _LONG else min(_FEW[-1], room.sequences), room.sequences}
            for too in ((False,) if sequences == 1 else (True,) if tokens > _LONG else (False, True))
        ]
        drafts = [kind._replace(drafts=kind.tokens) for kind in prompts if kind.tokens <= room.drafted]
        return sorted([*singles, *prompts, *drafts], reverse=True)

    def _kind(self, tokens: int, counts: list[int], *, drafts: bool = False) -> StepKind:
        """A step's kind: the smallest captured one that fits. With ``drafts`` one is sampled after each token."""
        room, sequences = self._layout.room, len(counts)
        if max(counts) == 1:
            sequences = _bucket(sequences, room.sequences)
            return StepKind(sequences, sequences, False, True)
        tokens, few = _bucket(tokens, room.tokens), min(_FEW[-1], room.sequences)
        if tokens > _LONG:
            return StepKind(tokens, room.sequences, True, room.sequences > 1)
        most = few if sequences <= few else room.sequences
        return StepKind(tokens, most, True, min(counts) == 1, tokens if drafts else 0)

    def _run(self, kind: StepKind) -> _StepOutputs:
        kept = self._graphs.get(kind)
        if kept is None:
            return self._body(kind)
        kept[0].replay()
        return kept[1]

    def _capture(self, kind: StepKind) -> None:
        torch.cuda.synchronize(self._place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            found = self._body(kind)
        self._pool = self._pool or graph.pool()
        self._graphs[kind] = (graph, found)

    def _body(self, kind: StepKind) -> _StepOutputs:
        """The whole step, from the device's lists to the sampled tokens, without synchronization."""
        layout, model = self._layout, self._decoder
        tokens, sequences = kind.tokens, kind.sequences
        positions, owners = layout.part("positions", tokens), layout.part("owners", tokens)
        history = self._choices.history
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
        chosen, logprobs, sound = sample_tokens(logits, choosers, lengths, self._choices)
        return _StepOutputs(logits, torch.stack([logprobs, sound.float()]), chosen)

    def _release(self) -> None:
        """Free the slots of sequences that ended or were preempted."""
        for sequence, slot in list(self._slots.items()):
            if sequence.finish is not None or sequence.blocks is not self._blocks[slot] or not sequence.blocks:
                self._forget(sequence)

    def _make_slots(self, plan: StepPlan) -> None:
        """Take slots of paused sequences for those of a step that have none."""
        taken = {chunk.sequence for chunk in plan.chunks}
        # A prompt's other samples get theirs when the first has been sampled.
        wanted = sum(sequence not in self._slots for chunk in plan.chunks for sequence in _sampled(chunk))
        for sequence in list(self._slots):
            if len(self._free) >= wanted:
                return
            if sequence not in taken:
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, if it has one."""
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            del self._blocks[slot]
            self._free.append(slot)

    def _part(self, chunk: Chunk, draft: SequenceOf[int]) -> SequenceTokens:
        sequence = chunk.sequence
        fresh = sequence not in self._slots
        slot = self._slot_of(sequence)
        if slot in self._stale:
            self._stale.discard(slot)
            fresh = True
        count = chunk.count + len(draft)
        return SequenceTokens(chunk.start, count, list(sequence.blocks), slot, chunk.is_last, fresh, draft)

    def _slot_of(self, sequence: Sequence) -> int:
        """The sequence's slot on the device, assigned if it has none."""
        slot = self._slots.get(sequence)
        if slot is None:
            slot = self._free.pop()
            self._slots[sequence], self._blocks[slot] = slot, sequence.blocks
            self._stale.discard(slot)
            self._introduce(sequence, slot)
        return slot

    def _introduce(self, sequence: Sequence, slot: int) -> None:
        """Send a sequence's tokens and sampling parameters to the device."""
        params, known = sequence.request.params, self._choices
        edits = _edits(sequence.request, self._ends)
        tokens, values, until = zip(*edits, strict=True) if edits else ((), (), ())
        of_edits = slice(0, len(edits))
        for place, given in (
            (known.history[slot, : len(sequence.tokens)], sequence.tokens),
            (known.edit_tokens[slot, of_edits], tokens),
            (known.edit_values[slot, of_edits], values),
            (known.edit_until[slot, of_edits], until),
            (known.prompt_lengths[slot : slot + 1], [len(sequence.request.prompt)]),
            (known.temperature[slot : slot + 1], [params.temperature]),
            (known.top_k[slot : slot + 1], [max(params.top_k, 0)]),
            (known.top_p[slot : slot + 1], [params.top_p]),
            (known.min_p[slot : slot + 1], [params.min_p]),
            (known.repetition[slot : slot + 1], [params.repetition_penalty]),
            (known.presence[slot : slot + 1], [params.presence_penalty]),
            (known.frequency[slot : slot + 1], [params.frequency_penalty]),
            (known.seeds[slot : slot + 1], [sequence_seed(sequence, self._seed)]),
            (known.edit_counts[slot : slot + 1], [len(edits)]),
        ):
            host = torch.tensor(given, dtype=place.dtype, device="cpu")
            # From pinned memory the copy is asynchronous.
            place.copy_(host.pin_memory() if self._place.type == "cuda" else host, non_blocking=True)

    def _chosen(
        self, there: Tensor, logits: Tensor, stats: LogitStatistics, rows: list[int], sequences: list[Sequence]
    ) -> dict[Sequence, list[Sampled]]:
        """Sample on the device where possible, as in asynchronous steps, so that a seed gives the same tokens in any batch."""
        here = [i for i, sequence in enumerate(sequences) if not self._samples(sequence.request)]
        found = super()._chosen(there, logits, stats, [rows[i] for i in here], [sequences[i] for i in here])
        mine = [i for i in range(len(sequences)) if i not in set(here)]
        if not mine:
            return found
        slots = [self._slot_of(sequences[i]) for i in mine]
        lengths = [len(sequences[i].tokens) for i in mine]
        which, slot, length = (
            torch.tensor(part, dtype=torch.int32, device=self._place)
            for part in ([rows[i] for i in mine], slots, lengths)
        )
        with self._current:
            tokens, logprobs, _ = sample_tokens(there.index_select(0, which).float(), slot, length, self._choices)
        for i, token, logprob in zip(mine, tokens.tolist(), logprobs.tolist(), strict=True):
            count = sequences[i].request.params.logprobs
            top = None if count is None else top_logprobs(logits[rows[i]], token, count)
            found[sequences[i]] = [Sampled(token, logprob, top)]
        return found


@dataclass(frozen=True)
class _StepOutputs:
    """A step's outputs on the device.

    Attributes:
        logits: ``[wanted, vocabulary]``.
        scores: float32 ``[2, wanted]``: the tokens' log probabilities, and whether logits were finite.
        chosen: int32, the tokens themselves.
    """

    logits: Tensor
    scores: Tensor
    chosen: Tensor

    def sent(self, plan: StepPlan, drafts: SequenceOf[SequenceOf[int]]) -> _Sent:
        """Start the copy to the host."""
        asked: dict[int, int] = {}
        row = 0
        for chunk, draft in zip(plan.chunks, drafts, strict=True):
            rows = range(row, row := row + 1 + len(draft))
            count = chunk.sequence.request.params.logprobs
            if chunk.is_last and count is not None:
                asked |= dict.fromkeys(rows, count)
        best, wanting = None, {row: (row, count) for row, count in asked.items()}
        if asked:
            logits = self.logits[:row]
            if any(drafts):  # many rows, and no next step is being prepared that a copy to the device would hold up
                logits = logits[torch.tensor(list(asked), device=logits.device)]
                wanting = {row: (place, count) for place, (row, count) in enumerate(asked.items())}
            values, tokens = logits.log_softmax(-1).topk(max(1, *asked.values()))
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
    wanting: dict[
        int, tuple[int, int]
    ]  # of rows whose most likely tokens are asked for: where they are in `best`, and how many
    best: tuple[Tensor, Tensor] | None
    event: torch.cuda.Event | None


def _host(tensor: Tensor) -> Tensor:
    """An asynchronous copy on the host, valid once the stream has reached it."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu").copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class _LaunchedStep:
    """A running step.

    Attributes:
        drafts: a chain for each chunk, empty for most.
    """

    plan: StepPlan
    drafts: SequenceOf[SequenceOf[int]]
    sent: _Sent
    completed: bool = False

    def collect(self) -> StepResult:
        """Its results; waits for the device."""
        return self.with_outcomes()[0]

    def with_outcomes(self) -> tuple[StepResult, dict[Sequence, DraftOutcome]]:
        """The same, and what became of its drafts."""
        if self.sent.event is not None:
            self.sent.event.synchronize()
        logprobs, sound = self.sent.scores.tolist()
        tokens = self.sent.chosen.tolist()
        result, outcomes = StepResult(), {}
        row = 0
        for chunk, draft in zip(self.plan.chunks, self.drafts, strict=True):
            rows = range(row, row := row + 1 + len(draft))
            if not sound[rows.start] and chunk.is_last:
                result.broken.append(chunk.sequence)
            elif chunk.is_last:
                mine = slice(rows.start, rows.stop)
                found = VerifiedChain.of(draft, tokens[mine], sound[mine])
                result.tokens[chunk.sequence] = [
                    Sampled(tokens[i], logprobs[i], self._top(i, tokens[i], logprobs[i])) for i in rows[: found.count]
                ]
                if draft:
                    outcomes[chunk.sequence] = found.outcome
        return result, outcomes

    def _top(self, row: int, token: int, logprob: float) -> TokenLogprobs | None:
        """The most likely tokens at a row, if they are asked for."""
        if row not in self.sent.wanting or self.sent.best is None:
            return None
        place, count = self.sent.wanting[row]
        values, best = (part[place, :count].tolist() for part in self.sent.best)
        top = dict(zip(best, values, strict=True))
        top.setdefault(token, logprob)
        return top


def _chain_of(proposed: Drafts, chunk: Chunk) -> list[int]:
    tree = proposed.of.get(chunk.sequence)
    return [] if tree is None else tree.chain


class _RotaryBuffers:
    """RoPE cosines and sines for steps: tables of all positions, or per step where frequencies depend on the length."""

    def __init__(self, model: Model, tokens: int, longest: int) -> None:
        self._rotations = model.rotations
        self.by_length = model.rotations.by_length
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        with model.device:
            if not self.by_length:
                self._tables = {name: _flat(table) for name, table in model.rotations.tables(longest).items()}
                return
            probe = model.rotations.of(torch.zeros(1, dtype=torch.int64), [(1, 1)])
            for name, (cosine, _) in probe.items():
                shape = (tokens, cosine.shape[-1])
                self._tables[name] = (torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype))
            self._each = torch.arange(tokens, dtype=torch.int32)

    def fill(self, positions: Tensor, lengths: list[tuple[int, int]]) -> None:
        """Send a step's values, computed on the host from its positions."""
        for name, table in self._rotations.of(positions, lengths).items():
            for kept, new in zip(self._tables[name], _flat(table), strict=True):
                kept[: len(new)].copy_(new.pin_memory() if kept.device.type == "cuda" else new, non_blocking=True)

    def of(self, positions: Tensor) -> dict[str, RotaryTables]:
        """A step's values."""
        rows = self._each[: len(positions)] if self.by_length else positions
        return {name: RotaryTables(cosine, sine, rows) for name, (cosine, sine) in self._tables.items()}


def _flat(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return table[0].flatten(1).contiguous(), table[1].flatten(1).contiguous()


def buckets(most: int) -> list[int]:
    """The sizes to which steps are padded, and ``most``: 1, 2, 4, 8, 16, 32, then by 32 to 128, by half to 512, then by an eighth.

    Padding is wasted work. Few tokens cost little more than reading the weights; beyond 512 each costs its
    products, so sizes are closer together, at multiples of 64.
    """
    found = [size for size in _FEW if size < most]
    size = 16
    while size < most:
        found.append(size)
        if size < 128:
            size += min(size, 32)
        elif size < 512:
            size = min(size + size // 2, 512)
        else:
            size = -(-(size + size // 8) // 64) * 64
    return [*found, most]


def _bucket(count: int, most: int) -> int:
    """The next of :func:`buckets`."""
    return next(size for size in buckets(most) if size >= count)


def _is_changed(params: SamplingParams) -> bool:
    """Whether logits are changed or filtered before a token is sampled."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    narrowed = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return bool(penalties or narrowed)


def _sampled(chunk: Chunk) -> list[Sequence]:
    """The sequences that a chunk may give a token."""
    request = chunk.sequence.request
    return [chunk.sequence] if request.forked else request.sequences


def _edits(request: Request, ends: frozenset[int]) -> list[tuple[int, float, int]]:
    """The additions to logits, and the length up to which they apply."""
    params = request.params
    found = [(token, float(bias), _ALWAYS) for token, bias in params.logit_bias.items()]
    if params.min_tokens:
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
        until = len(request.prompt) + params.min_tokens
        found += [(token, float("-inf"), until) for token in sorted(stops)]
    return found
