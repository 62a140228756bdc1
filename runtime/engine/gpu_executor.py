"""Steps on a GPU: prepared while the previous one runs, replayed as CUDA graphs, with sampling on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...system.progress import Log
from ..decoder.kv_cache import KeysValues
from ..decoder.logit_statistics import LogitStatistics
from ..decoder.model import Model
from ..gpu import step_kinds
from ..gpu.cache import GpuKeysValues
from ..gpu.layers import GpuLayers
from ..gpu.sampled_steps import SampledSteps, StepOutputs
from ..gpu.step_kinds import StepKind, bucket, buckets
from ..gpu.step_tables import Room, SequenceTokens, TableLayout
from ..kernels.base.targets import target_of
from ..kernels.rows.sample_tokens import SamplingState, choices, sample_tokens
from ..requests.noise import PhiloxNoise
from ..requests.params import SamplingParams
from ..requests.sequence import Request, Sequence, TokenLogprobs
from ..sampling.sampling import Sampled, sequence_seed, top_logprobs
from ..scheduling.plan import Chunk, StepPlan
from ..speculation.counts import DraftOutcome
from ..speculation.drafter import Drafter, Drafts
from ..speculation.length import Drafted
from ..speculation.model_drafter import ModelDrafter
from ..speculation.verification import VerifiedChain
from .executor import CompletedStep, RunsBatches, StepHandle, StepResult
from .host_blocks import HostBlocks
from .torch_executor import TorchExecutor

_EDITS = 64  # of logits, per request on the device
_ALWAYS = 2**31 - 1
# Tokens of a step in which drafts are verified, one of those that steps are padded to. Each has a row of logits, so in longer ones, with
# prompts, lm_head would compute many that nobody wants, or more kinds of steps were needed.
_VERIFIED = 288
_OF_DRAFT = 4  # tokens of a sequence in a step that is timed


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
        self._cache = store
        self._place = model.device
        blocks = -(-max_length // store.block_size)
        of_tile = model.stack.tokens_of_tile(store)
        tokens = max(token_budget, max_sequences)
        drafted = max((size for size in buckets(tokens) if size <= _VERIFIED), default=0) if drafter else 0
        room = Room(tokens, max_sequences, blocks, of_tile, drafted)
        self._layout = TableLayout(room, self._place)
        self._choices: SamplingState = choices(max_sequences, _EDITS, max_length, self._place)
        self._slots: dict[Sequence, int] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}
        self._current = torch.cuda.device(self._place) if self._place.type == "cuda" else nullcontext()
        self._stale: set[int] = set()  # slots whose blocks on the device are outdated
        self._sees_stores = target_of(self._place).splits
        self._logits = torch.empty(room.wanted, model.spec.vocabulary, dtype=torch.float32, device=self._place)
        self._longest, self._captures = max_length, graphs
        self._steps = self._steps_of(model, store)
        self._drafter_steps: SampledSteps | None = None
        if isinstance(drafter, ModelDrafter) and _same_kind(drafter.model, model):
            self._drafter_steps = self._steps_of(drafter.model, drafter.store)

    def _steps_of(self, model: Model, store: KeysValues) -> SampledSteps:
        assert isinstance(store, GpuKeysValues)
        options: dict[str, Any] = {"longest": self._longest, "graphs": self._captures}
        return SampledSteps(model, store, self._layout, self._choices, self._logits, self._device, **options)

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
            proposed = self._proposed(plan, self._drafter)
            drafted = time.perf_counter()
            drafts = [_chain_of(proposed, chunk) for chunk in plan.chunks]
            if sum(chunk.count for chunk in plan.chunks) + sum(map(len, drafts)) > self._layout.room.drafted:
                drafts = [[] for _ in drafts]  # beside a long prompt: see _VERIFIED
            result, verified = self._start(plan, drafts).with_outcomes()
            drafting = drafted - begun - proposed.preparing
            result.drafted = Drafted(verified, drafting, proposed.prepared, proposed.preparing)
            return CompletedStep(result)

    def _proposed(self, plan: StepPlan, drafter: Drafter) -> Drafts:
        """Drafts, of a model's own steps on the device where that is possible."""
        if self._drafter_steps is None or not isinstance(drafter, ModelDrafter):
            return drafter.propose(plan)
        chunks = {chunk.sequence: chunk for chunk in plan.chunks}
        return drafter.propose(plan, lambda lengths: self._chains(chunks, lengths))

    def _chains(
        self, chunks: Mapping[Sequence, Chunk], lengths: Mapping[Sequence, int]
    ) -> dict[Sequence, tuple[list[int], int]]:
        """What the drafter's steps sample, each from the one before it, and how many of that are of use; the host waits once.

        Args:
            chunks: the verification's, of all sequences.
            lengths: how many tokens each is to have.
        """
        assert self._drafter_steps is not None
        sent: list[tuple[list[Sequence], Tensor, Tensor]] = []
        for i in range(max(lengths.values(), default=0)):
            mine = [sequence for sequence, length in lengths.items() if length > i]
            parts = [self._part_of_draft(chunks[sequence], i) for sequence in mine]
            kind = StepKind.of_singles(bucket(len(mine), self._layout.room.sequences))
            found = self._drafter_steps.start(kind, parts, [each.request.grows_to for each in mine])
            sent.append((mine, _host(found.chosen), _host(found.scores[1])))
        if self._place.type == "cuda":
            last = torch.cuda.Event()
            last.record()
            last.synchronize()
        chains: dict[Sequence, tuple[list[int], int]] = {sequence: ([], 0) for sequence in lengths}
        for i, (mine, chosen, sound) in enumerate(sent):
            for sequence, token, is_sound in zip(mine, chosen.tolist(), sound.tolist(), strict=False):
                tokens, of_use = chains[sequence]
                chains[sequence] = [*tokens, token], of_use + int(bool(is_sound) and of_use == i)
        return chains

    def _part_of_draft(self, chunk: Chunk, place: int) -> SequenceTokens:
        """The last token of a sequence, or one of its draft's."""
        part = self._part(chunk, ())
        return replace(part, start=chunk.start + place, count=1, chooses=True)

    def _start(self, plan: StepPlan, drafts: SequenceOf[SequenceOf[int]]) -> _LaunchedStep:
        """Start a step whose tokens are sampled on the device."""
        parts = [self._part(chunk, draft) for chunk, draft in zip(plan.chunks, drafts, strict=True)]
        counts = [part.count for part in parts]
        kind = self._kind(sum(counts), counts, drafts=any(drafts))
        found = self._steps.start(kind, parts, [chunk.sequence.request.grows_to for chunk in plan.chunks])
        return _LaunchedStep(plan, drafts, _Sent.of(found, plan, drafts))

    def warm_up(self, log: Log) -> None:
        """Compile the kernels and capture the graphs.

        Args:
            log: gets messages for the user.
        """
        with self._current, torch.inference_mode():
            self._steps.warm_up(self._kinds(), log)
            if self._drafter_steps is not None:
                self._drafter_steps.warm_up(self._single_kinds(), lambda text: log(f"the drafter: {text}"))

    @torch.inference_mode()
    def timed(self, tokens: int, *, drafts: bool) -> Tensor:
        """As the steps are that will run: in graphs, where there are any."""
        if drafts and self._drafter_steps is None:
            return super().timed(tokens, drafts=drafts)
        # Before there is any sequence, each place is free.
        if drafts or tokens == 1:
            counts = [1] * tokens
        else:
            sequences = min(self._layout.room.sequences, max(1, tokens // _OF_DRAFT))
            counts = [min(self._longest, tokens // sequences + (i < tokens % sequences)) for i in range(sequences)]
        blocks = [0] * self._layout.room.blocks
        parts = [SequenceTokens(0, n, blocks, i, True, True, [0] * (n - 1)) for i, n in enumerate(counts)]
        kind = self._kind(sum(counts), counts, drafts=max(counts) > 1)
        steps = self._drafter_steps if drafts and self._drafter_steps is not None else self._steps
        with self._current:
            return steps.start(kind, parts, counts).chosen

    def _kinds(self) -> list[StepKind]:
        """The kinds of steps to capture, the largest first."""
        room = self._layout.room
        prompts = [
            StepKind(tokens, sequences, True, too)
            for tokens in buckets(room.tokens)
            if tokens > 1
            for sequences in {
                room.sequences if tokens > step_kinds.LONG else min(step_kinds.FEW[-1], room.sequences),
                room.sequences,
            }
            for too in ((False,) if sequences == 1 else (True,) if tokens > step_kinds.LONG else (False, True))
        ]
        drafts = [kind._replace(drafts=kind.tokens) for kind in prompts if kind.tokens <= room.drafted]
        return sorted([*self._single_kinds(), *prompts, *drafts], reverse=True)

    def _single_kinds(self) -> list[StepKind]:
        return [StepKind.of_singles(count) for count in reversed(buckets(self._layout.room.sequences))]

    def _kind(self, tokens: int, counts: list[int], *, drafts: bool = False) -> StepKind:
        """A step's kind: the smallest captured one that fits. With ``drafts`` one is sampled after each token."""
        room, sequences = self._layout.room, len(counts)
        if max(counts) == 1:
            return StepKind.of_singles(bucket(sequences, room.sequences))
        tokens, few = bucket(tokens, room.tokens), min(step_kinds.FEW[-1], room.sequences)
        if tokens > step_kinds.LONG:
            return StepKind(tokens, room.sequences, True, room.sequences > 1)
        most = few if sequences <= few else room.sequences
        return StepKind(tokens, most, True, min(counts) == 1, tokens if drafts else 0)

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
class _Sent:
    """A step's outputs on their way to the host.

    Attributes:
        scores, chosen: as in :class:`StepOutputs`.
        wanting: of rows whose most likely tokens are asked for: where they are in ``best``, and how many.
        best: the most likely tokens' log probabilities, and these tokens; None if nobody asks for them.
        event: after which all have come; None if they have.
    """

    scores: Tensor
    chosen: Tensor
    wanting: dict[int, tuple[int, int]]
    best: tuple[Tensor, Tensor] | None
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, found: StepOutputs, plan: StepPlan, drafts: SequenceOf[SequenceOf[int]]) -> _Sent:
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
            logits = found.logits[:row]
            if any(drafts):  # many rows, and no next step is being prepared that a copy to the device would hold up
                logits = logits[torch.tensor(list(asked), device=logits.device)]
                wanting = {row: (place, count) for place, (row, count) in enumerate(asked.items())}
            values, tokens = logits.log_softmax(-1).topk(max(1, *asked.values()))
            best = (_host(values), _host(tokens))
        scores, chosen, event = _host(found.scores), _host(found.chosen), None
        if found.scores.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return cls(scores, chosen, wanting, best, event)


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


def _same_kind(drafter: Model, model: Model) -> bool:
    """Whether a drafter's steps can choose tokens where the model's do."""
    return isinstance(drafter.stack, GpuLayers) and drafter.spec.vocabulary == model.spec.vocabulary


def _chain_of(proposed: Drafts, chunk: Chunk) -> list[int]:
    tree = proposed.of.get(chunk.sequence)
    return [] if tree is None else tree.chain


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
