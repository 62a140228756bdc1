"""Drafts that grow by a token of each sequence at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoder.parts.batch import Run
from ..decoder.parts.kv_cache import KeysValues
from ..requests.sequence import Sequence
from ..sampling.draw import Draw, DrawTokens
from ..sampling.sampling import draw_for, trying
from ..scheduling.plan import DraftRule, StepPlan
from .caches import DraftCache
from .drafter import Chains, Drafts, PlannedChain
from .growing import DraftChoice, GrowingBranch, GrowingDraft


@dataclass(frozen=True)
class Verifying:
    """What drafters have in common with the engine whose model verifies.

    Attributes:
        vocabulary: of the model.
        ends: tokens that end a sequence.
        seed: for requests without one.
        max_num_batched_tokens: the most tokens that are computed at once.
        device: where steps are laid out and computed.
    """

    vocabulary: int
    ends: frozenset[int]
    seed: int
    max_num_batched_tokens: int
    device: AbstractContextManager[object]


class StepwiseDrafter(ABC):
    """What computes the logits of a draft's next token from those before it, and chooses as the verifier will.

    Args:
        cache: its keys and values.
        draw_tokens: chooses from rows of its logits.
        verifying: of the engine whose model verifies.
        longest: the most tokens of a sequence and its draft.
        tokens: which of the verifier's tokens each of its logits is for; None for the first ones, in their order.

    Attributes:
        longest_branch: one token, or as many as the chain where a branch can go on beside it.
        behind: how many positions before a token have keys and values that depend on it.
        is_whole: whether this process has all of it; else each of several ranks has a part.
    """

    longest_branch: int | None = None
    behind = 0
    is_whole = True

    def __init__(
        self,
        cache: DraftCache,
        draw_tokens: DrawTokens,
        verifying: Verifying,
        *,
        longest: int,
        tokens: Tensor | None = None,
    ) -> None:
        self._cache, self._draw_tokens = cache, draw_tokens
        self._vocabulary, self._ends, self._seed = verifying.vocabulary, verifying.ends, verifying.seed
        self._budget, self._device = verifying.max_num_batched_tokens, verifying.device
        self._longest, self._tokens = longest, tokens

    @property
    def store(self) -> KeysValues:
        """Its keys and values."""
        return self._cache.store

    @abstractmethod
    def unprepared(self, sequence: Sequence) -> int:
        """How many tokens it would have to compute before it can draft for a sequence."""

    @abstractmethod
    def compute(self, runs: list[Run]) -> Tensor:
        """A step, to be measured; returns the wanted rows of logits."""

    @abstractmethod
    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """The positions that must be computed before a draft begins."""

    @abstractmethod
    def _run(self, sequence: Sequence, start: int, stop: int, wants: int) -> Run:
        """Some positions of a sequence."""

    @abstractmethod
    def _begin(self, sequence: Sequence) -> tuple[int, int]:
        """The positions that a draft's first step computes, which count as computed from here on."""

    @abstractmethod
    def _logits(self, sequences: list[Sequence]) -> Tensor:
        """Logits of the next token of each, in float32 on the host."""

    @torch.inference_mode()
    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Drafts of all sequences, a token of each at a time.

        Args:
            plan: the step that verifies them.
            chains: computes them elsewhere, without branches and constraints; None to choose each token here.
        """
        self._cache.begin(plan)
        rule = next((chunk.rule for chunk in plan.chunks if chunk.drafts), None)
        growing = {
            chunk.sequence: GrowingDraft(
                chunk.sequence,
                min(chunk.drafts, self._longest - len(chunk.sequence.tokens)),
                chunk.branched,
                chunk.spare,
                self.longest_branch if chunk.sequence.matcher is None else 1,
                self._cache.store.block_size,
                self.behind,
                self._final(chunk.sequence),
                rule,
            )
            for chunk in plan.chunks
            if chunk.drafts and self._may_draft(chunk.sequence)
        }
        if not growing:
            return Drafts()
        begun = time.perf_counter()
        prepared = self._prepare(list(growing))
        preparing = time.perf_counter() - begun
        if chains is None:
            self._grow(growing, rule)
            for sequence, draft in growing.items():
                branches = {each.spare: each.whole for each in draft.branches if each.sequence is not None}
                self._cache.drafted(sequence, draft.chain, branches)
        else:
            found = chains({each: PlannedChain(*self._begin(each), draft.longest) for each, draft in growing.items()})
            for sequence, drafted in found.items():
                self._cache.drafted(sequence, drafted.tokens)
                ends = (i + 1 for i, token in enumerate(drafted.tokens) if self._is_over(sequence, token))
                growing[sequence].chain = drafted.tokens[: min(drafted.of_use, next(ends, drafted.of_use))]
        return Drafts({sequence: draft.tree() for sequence, draft in growing.items()}, prepared, preparing)

    def _prepare(self, sequences: list[Sequence]) -> int:
        """Compute what comes before the drafts of some sequences; returns how many tokens that were."""
        count, last = 0, None
        for sequence in sequences:
            start, stop = self._missing(sequence)
            count += stop - start
            while start < stop:
                piece = min(self._budget, stop - start)
                last = self.compute([self._run(sequence, start, start + piece, 0)])
                self._cache.computed(sequence, start, start + piece)
                start += piece
        if last is not None and last.device.type == "cuda":
            torch.cuda.current_stream(last.device).synchronize()  # or its time would be taken for the drafts'
        return count

    def _grow(self, growing: dict[Sequence, GrowingDraft], rule: DraftRule | None = None) -> None:
        with ExitStack() as stack:
            for sequence in growing:
                stack.enter_context(trying(sequence))
            parts: dict[Sequence, GrowingDraft | GrowingBranch] = dict(growing)
            while parts:
                for sequence, choice in self._next(parts).items():
                    self._add(sequence, parts[sequence], choice)
                going_on = [part for draft in growing.values() for part in draft.going_on()]
                if rule is not None:
                    chosen = rule.going_on([part.path for part in going_on])
                    for place, part in enumerate(going_on):
                        part.is_complete = place not in chosen
                parts = {self._sequence_of(part): part for part in going_on if not part.is_complete}

    def _add(self, sequence: Sequence, part: GrowingDraft | GrowingBranch, choice: DraftChoice | None) -> None:
        if choice is None:
            part.is_complete = True
            return
        part.add(choice)
        sequence.tokens.append(choice.token)
        if sequence.matcher is not None:
            sequence.matcher.accept(choice.token)
        part.is_complete = self._is_over(sequence, choice.token)

    def _sequence_of(self, part: GrowingDraft | GrowingBranch) -> Sequence:
        """With the part's tokens; a branch that goes on gets one of its own, in its spare block from where it leaves the chain."""
        if part.sequence is None:
            assert isinstance(part, GrowingBranch)
            chain, size = part.draft.sequence, self._cache.store.block_size
            leaves = part.draft.begin + part.after
            place, inside = divmod(leaves, size)
            part.sequence = Sequence(chain.request, chain.index, chain.tokens[:leaves] + part.tokens)
            part.sequence.certain = part.draft.begin
            part.sequence.blocks = [*chain.blocks[:place], part.spare]
            self._cache.branched(chain.blocks[place] if inside else None, part.spare)
        return part.sequence

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """As the cache has it."""
        self._cache.replaced(sequence, block, by)

    def _may_draft(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) < self._longest

    def _next(self, parts: Mapping[Sequence, GrowingDraft | GrowingBranch]) -> dict[Sequence, DraftChoice | None]:
        """The next token of each part of a draft, by the sequence with its tokens, chosen as the verifier will choose its own. None where none of the drafter's tokens is allowed."""
        sequences = list(parts)
        logits = self._logits(sequences)
        if self._tokens is None:  # the drafter's table may be padded further than the model's
            logits = logits[:, : self._vocabulary].contiguous()
        draws = [self._draw(row, each, parts[each].others_each) for row, each in zip(logits, sequences, strict=True)]
        found: dict[Sequence, DraftChoice | None] = {}
        for sequence, ranked in zip(sequences, self._draw_tokens(draws), strict=True):
            if not ranked:
                found[sequence] = None
                continue
            places = None if not sequence.request.params.is_plainly_greedy else self._tokens
            first, *others = [(odds, token if places is None else int(places[token])) for token, odds in ranked]
            second = others[0][0] if others else 0.0
            found[sequence] = DraftChoice(first[1], second, others[: parts[sequence].others_each])
        return found

    def _draw(self, logits: Tensor, sequence: Sequence, others: int) -> Draw:
        """What ranks the next token, the second one for its odds, and ``others`` as branches."""
        count = 1 + max(1, others)
        if sequence.request.params.is_plainly_greedy:  # among the drafter's own tokens, whatever they stand for
            return draw_for(logits, sequence, self._ends, self._seed, count)
        return draw_for(self._of_all(logits), sequence, self._ends, self._seed, count)

    def _of_all(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary, of which the drafter's may be a part; tables of embeddings may be padded, too."""
        if self._tokens is None and len(logits) == self._vocabulary:
            return logits
        whole = logits.new_full((self._vocabulary,), float("-inf"))
        whole[slice(len(logits)) if self._tokens is None else self._tokens] = logits
        return whole

    def _is_over(self, sequence: Sequence, token: int) -> bool:
        """Whether nothing after a token would be of use."""
        matcher = sequence.matcher
        if matcher is not None and (matcher.is_complete or matcher.failure is not None):
            return True
        return token in self._final(sequence)

    def _final(self, sequence: Sequence) -> Set[int]:
        """Tokens after which none is of use."""
        params = sequence.request.params
        return self._ends.union(params.stop_token_ids) if not params.ignore_eos else frozenset(params.stop_token_ids)
