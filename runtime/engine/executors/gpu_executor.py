"""Steps on a GPU: prepared while the previous one runs, replayed as CUDA graphs, with sampling on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....system.progress import Log
from ...gpu.cache import GpuKeysValues
from ...gpu.draft_chains import DraftChains
from ...gpu.head_steps import HeadSteps
from ...gpu.layers import GpuLayers
from ...gpu.sampled_steps import ModelSteps, StepRoom
from ...gpu.step_kinds import StepKinds, buckets
from ...gpu.step_tables import Room, SequenceTokens, TableLayout
from ...kernels.base.precompile import precompile_work
from ...kernels.base.targets import target_of
from ...kernels.rows.sample_tokens import sample_tokens
from ...kernels.rows.sampling_state import SamplingState, choices
from ...requests.params import SamplingParams
from ...requests.sequence import Request, Sequence
from ...sampling.logit_statistics import LogitStatistics
from ...sampling.sampling import Sampled, sequence_seed, top_logprobs
from ...scheduling.plan import Chunk, StepPlan
from ...speculation.drafter import DraftedChain, Drafter, Drafts, PlannedChain
from ...speculation.eagle.head_drafter import HeadDrafter
from ...speculation.fixed_length import Drafted
from ...speculation.lookup_first import weights_of
from ...speculation.model_drafter import ModelDrafter
from ..setup.parts import EngineParts
from .executor import CompletedStep, StepHandle
from .launched_step import LaunchedStep, SentOutputs
from .torch_executor import TorchExecutor

_EDITS = 64  # of logits, per request on the device
_ALWAYS = 2**31 - 1
# Tokens of a step in which drafts are verified, one of those that steps are padded to. Each has a row of logits, so in longer ones, with
# prompts, lm_head would compute many that nobody wants, or more kinds of steps were needed.
_VERIFIED = 288
_OF_DRAFT = 4  # tokens of a sequence in a step that is timed


class GpuExecutor(TorchExecutor):
    """Like :class:`TorchExecutor`; steps with sampling on the device run asynchronously, unless tokens are drafted from theirs."""

    def __init__(self, parts: EngineParts, drafter: Drafter | None = None) -> None:
        super().__init__(parts, drafter)
        model, store, config = parts.model, parts.store, parts.config
        assert isinstance(store, GpuKeysValues)
        assert isinstance(model.stack, GpuLayers)
        self._cache = store
        self._place = model.device
        blocks = -(-parts.max_model_len // store.block_size)
        of_tile = model.stack.tokens_of_tile(store)
        tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
        drafted = max((size for size in buckets(tokens) if size <= _VERIFIED), default=0) if drafter else 0
        room = Room(tokens, config.max_num_seqs, blocks, of_tile, drafted)
        self._layout, self._kinds = TableLayout(room, self._place), StepKinds(room)
        self._choices: SamplingState = choices(config.max_num_seqs, _EDITS, parts.max_model_len, self._place)
        self._slots: dict[Sequence, int] = {}
        self._free = list(range(config.max_num_seqs - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}
        self._current = torch.cuda.device(self._place) if self._place.type == "cuda" else nullcontext()
        self._stale: set[int] = set()  # slots whose blocks the device does not have
        self._sees_stores = target_of(self._place).splits
        self._logits = torch.empty(room.wanted, model.spec.vocabulary, dtype=torch.float32, device=self._place)
        assert model.operators.fusions is not None
        self._longest = parts.max_model_len
        graphs = model.operators.fusions.graphs
        self._room = StepRoom(self._layout, self._choices, self._logits, self._device, self._longest, graphs)
        self._steps = ModelSteps(model, store, self._room)
        self._chained = self._chains_of(drafter)

    def _chains_of(self, drafter: Drafter | None) -> DraftChains | None:
        """A drafter's steps, if they can choose tokens where the model's do."""
        drafter = weights_of(drafter)
        if isinstance(drafter, ModelDrafter):
            draft = drafter.model
            if not isinstance(draft.stack, GpuLayers) or draft.spec.vocabulary != self._logits.shape[1]:
                return None
            steps = ModelSteps(draft, drafter.store, self._room)
            return DraftChains(steps, steps, self._layout)
        if isinstance(drafter, HeadDrafter) and isinstance(drafter.head.stack, GpuLayers):
            assert isinstance(drafter.store, GpuKeysValues)
            head, room = drafter.head, self._layout.room
            # Tables of its own: attention of its heads may have other tiles.
            of_tile = drafter.head.stack.tokens_of_tile(drafter.store)
            mine = Room(max(room.drafted, room.sequences, drafter.together), room.sequences, room.blocks, of_tile)
            layout = TableLayout(mine, self._place)
            states = torch.zeros(mine.sequences + 1, head.hidden, dtype=head.dtype, device=self._place)
            own = replace(self._room, layout=layout)
            first, later = (HeadSteps(drafter, own, states, goes_on=goes_on) for goes_on in (False, True))
            return DraftChains(first, later, layout)
        return None

    @property
    def most_verified(self) -> int | None:
        """As many as there are graphs for (see ``_VERIFIED``)."""
        return self._layout.room.drafted

    @property
    def drafts_at_once(self) -> bool:
        """Whether a drafter's steps choose the token that the next one reads."""
        return self._chained is not None

    def runs_ahead(self, request: Request) -> bool:
        """Whether all its tokens can be sampled on the device, and none of them is needed to draft the next ones."""
        return self.drafter is None and self._samples(request)

    def _samples(self, request: Request) -> bool:
        """Whether all its tokens can be sampled on the device."""
        if request.upper_bits:
            return False
        params = request.params
        plain = params.n == 1 and not params.is_beam_search and params.prompt_logprobs is None
        plain = plain and not params.forbids_tokens
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
        if any(chunk.spare or not self._samples(chunk.sequence.request) for chunk in plan.chunks):
            result = self._compute(plan)
            # They may have more blocks by now.
            self._stale.update(self._slots[c.sequence] for c in plan.chunks if c.sequence in self._slots)
            for sequence in () if result.drafted is None else result.drafted.of:
                self._forget(sequence)  # the device does not know what it got
            return CompletedStep(result)
        with self._current:
            self._move_blocks(plan)
            if self.drafter is None:
                return self._start(plan, [()] * len(plan.chunks))
            begun = time.perf_counter()
            proposed = self.drafter.propose(plan, None if self._chained is None else self._chains)
            drafted = time.perf_counter()
            drafts = [_chain_of(proposed, chunk) for chunk in plan.chunks]
            result, verified = self._start(plan, drafts).with_outcomes()
            drafting = drafted - begun - proposed.preparing
            result.drafted = Drafted(verified, drafting, proposed.prepared, proposed.preparing)
            return CompletedStep(result)

    def _chains(self, planned: Mapping[Sequence, PlannedChain]) -> dict[Sequence, DraftedChain]:
        """Drafts of sequences that all sample on the device."""
        assert self._chained is not None
        slots = {sequence: self._slot_of(sequence) for sequence in planned}
        fresh = set(slots.values())
        if self._chained.layout is self._layout:
            fresh &= self._stale
            self._stale -= fresh
        return self._chained.of(planned, slots, fresh)

    def _start(self, plan: StepPlan, drafts: SequenceOf[SequenceOf[int]]) -> LaunchedStep:
        """Start a step whose tokens are sampled on the device."""
        parts = [self._part(chunk, draft) for chunk, draft in zip(plan.chunks, drafts, strict=True)]
        counts = [part.count for part in parts]
        kind = self._kinds.of(counts, drafts=any(drafts))
        found = self._steps.start(kind, parts, [chunk.sequence.request.grows_to for chunk in plan.chunks])
        return LaunchedStep(plan, drafts, SentOutputs.of(found, plan, drafts))

    def warm_up(self, log: Log) -> None:
        """Compile the kernels and capture the graphs.

        Args:
            log: gets messages for the user.
        """
        with self._current, torch.inference_mode():
            self._steps.warm_up(self._kinds.all(), log)
            weights = weights_of(self.drafter)
            if isinstance(weights, ModelDrafter):
                reads = [partial(weights.warm_up, count) for count in buckets(weights.longest_piece)]
                if self._place.type == "cuda":
                    precompile_work(reads, lambda text: log(f"the drafter: {text}"))
                reads[-1]()
            if self._chained is not None:
                self._chained.warm_up(lambda text: log(f"the drafter: {text}"))

    @torch.inference_mode()
    def timed(self, tokens: int, *, drafts: bool) -> Tensor:
        """As the steps are that will run: in graphs, where there are any."""
        if drafts and self._chained is None:
            return super().timed(tokens, drafts=drafts)
        # Before there is any sequence, each place is free.
        if drafts or tokens == 1:
            counts = [1] * tokens
        else:
            sequences = min(self._layout.room.sequences, max(1, tokens // _OF_DRAFT))
            counts = [min(self._longest, tokens // sequences + (i < tokens % sequences)) for i in range(sequences)]
        blocks = [0] * self._layout.room.blocks
        parts = [SequenceTokens(0, n, blocks, i, True, True, [0] * (n - 1)) for i, n in enumerate(counts)]
        kind = self._kinds.of(counts, drafts=max(counts) > 1)
        steps = self._chained.later if drafts and self._chained is not None else self._steps
        with self._current:
            return steps.start(kind, parts, counts).chosen

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
        slot, count = self._slot_of(chunk.sequence), chunk.count + len(draft)
        fresh = slot in self._stale
        self._stale.discard(slot)
        return SequenceTokens(chunk.start, count, list(chunk.sequence.blocks), slot, chunk.is_last, fresh, draft)

    def _slot_of(self, sequence: Sequence) -> int:
        """The sequence's slot on the device, assigned if it has none."""
        slot = self._slots.get(sequence)
        if slot is None:
            slot = self._free.pop()
            self._slots[sequence], self._blocks[slot] = slot, sequence.blocks
            self._stale.add(slot)
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
            top = None if count is None else top_logprobs(logits[rows[i]], stats.total[rows[i]], token, count)
            found[sequences[i]] = [Sampled(token, logprob, top)]
        return found


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
