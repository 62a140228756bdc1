"""Drafts that grow by a token of each sequence at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

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
from .tree import DraftBranch, TokenTree


@dataclass(frozen=True)
class DraftChoice:
    """The next token of a draft.

    Attributes:
        token: that the drafter chose.
        odds: of the one that came second against it, from 0 to 1.
        others: those that came next, as many as the draft may have branches, with their odds.
    """

    token: int
    odds: float
    others: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class GrowingDraft:
    """A draft that is not complete.

    Attributes:
        longest: of its chain.
        branches: how many others it may have.
        others_each: how many others are asked for at each token.
        odds: of the second choice against each token of the chain.
        reached: how likely its chain is right so far, if the odds between the tokens are as the drafter has them.
        others: tokens besides the chain's: how likely each is, after how many of the chain's, and which.
    """

    longest: int
    branches: int
    others_each: int
    chain: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    reached: float = 1.0
    others: list[tuple[float, int, int]] = field(default_factory=list)

    def add(self, choice: DraftChoice) -> None:
        """The next token."""
        whole = self.reached / (1 + sum(odds for odds, _ in choice.others))
        self.others += [(whole * odds, len(self.chain), other) for odds, other in choice.others if odds > 0]
        self.chain.append(choice.token)
        self.odds.append(choice.odds)
        self.reached = whole

    def tree(self, rule: DraftRule | None) -> TokenTree:
        """With the others that a rule chooses, as many as the chain has left places; without one with the most likely."""
        if rule is None:
            branches = [(after, token) for _, after, token in sorted(self.others, reverse=True)[: self.branches]]
        else:
            seconds = {after: token for _, after, token in self.others}
            places = [place for place in rule.branching(self.odds) if place in seconds]
            room = min(self.branches, self.longest - len(self.chain))
            branches = [(place, seconds[place]) for place in places[:room]]
        return TokenTree(self.chain, [DraftBranch(after, [token]) for after, token in branches], self.odds)


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
        longest_branch: one token: those that came second cost nothing more, what would follow them a step each.
    """

    longest_branch: int | None = 1

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
                min(chunk.drafts, self._longest - len(chunk.sequence.tokens)),
                len(chunk.spare),
                len(chunk.spare) if rule is None else min(1, len(chunk.spare)),
            )
            for chunk in plan.chunks
            if chunk.drafts and self._may_draft(chunk.sequence)
        }
        begun = time.perf_counter()
        prepared = self._prepare(list(growing))
        preparing = time.perf_counter() - begun
        if chains is None:
            self._grow(growing, rule)
            for sequence, draft in growing.items():
                self._cache.drafted(sequence, draft.chain)
        else:
            found = chains({each: PlannedChain(*self._begin(each), draft.longest) for each, draft in growing.items()})
            for sequence, drafted in found.items():
                self._cache.drafted(sequence, drafted.tokens)
                ends = (i + 1 for i, token in enumerate(drafted.tokens) if self._is_over(sequence, token))
                growing[sequence].chain = drafted.tokens[: min(drafted.of_use, next(ends, drafted.of_use))]
        return Drafts({sequence: draft.tree(rule) for sequence, draft in growing.items()}, prepared, preparing)

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
            left = dict(growing)
            while left:
                for sequence, choice in self._next(left).items():
                    draft = left[sequence]
                    if choice is None:
                        del left[sequence]
                        continue
                    draft.add(choice)
                    sequence.tokens.append(choice.token)
                    if sequence.matcher is not None:
                        sequence.matcher.accept(choice.token)
                    if self._is_over(sequence, choice.token) or len(draft.chain) == draft.longest:
                        del left[sequence]
                if rule is not None:
                    going_on = rule.going_on({sequence: draft.odds for sequence, draft in left.items()})
                    left = {sequence: draft for sequence, draft in left.items() if sequence in going_on}

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """As the cache has it."""
        self._cache.replaced(block, by)

    def _may_draft(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) < self._longest

    def _next(self, drafts: dict[Sequence, GrowingDraft]) -> dict[Sequence, DraftChoice | None]:
        """The next token of each, chosen as the verifier will choose its own. None where none of the drafter's tokens is allowed."""
        sequences = list(drafts)
        logits = self._logits(sequences)
        if self._tokens is None:  # the drafter's table may be padded further than the model's
            logits = logits[:, : self._vocabulary].contiguous()
        draws = [self._draw(row, each, drafts[each].others_each) for row, each in zip(logits, sequences, strict=True)]
        found: dict[Sequence, DraftChoice | None] = {}
        for sequence, ranked in zip(sequences, self._draw_tokens(draws), strict=True):
            if not ranked:
                found[sequence] = None
                continue
            places = None if not sequence.request.params.is_plainly_greedy else self._tokens
            first, *others = [(odds, token if places is None else int(places[token])) for token, odds in ranked]
            second = others[0][0] if others else 0.0
            found[sequence] = DraftChoice(first[1], second, others[: drafts[sequence].others_each])
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
        params, matcher = sequence.request.params, sequence.matcher
        if matcher is not None and (matcher.is_complete or matcher.failure is not None):
            return True
        return token in params.stop_token_ids or (token in self._ends and not params.ignore_eos)
