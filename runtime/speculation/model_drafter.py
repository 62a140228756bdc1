"""Drafts by a model that is cheaper than the one that verifies them."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..decoder.batch import Run
from ..decoder.kv_cache import KeysValues
from ..decoder.model import Model
from ..requests.sequence import Sequence
from ..sampling.sampling import merits, trying
from ..scheduling.plan import StepPlan
from .caches import DraftCache
from .drafter import Drafts
from .tree import DraftBranch, TokenTree


@dataclass
class _Growing:
    """A draft that is not complete.

    Attributes:
        longest: of its chain.
        branches: how many others it may have.
        reached: how likely its chain is right so far, if the odds between the tokens are as the drafter has them.
        others: tokens besides the chain's: how likely each is, after how many of the chain's, and which.
    """

    longest: int
    branches: int
    chain: list[int] = field(default_factory=list)
    reached: float = 1.0
    others: list[tuple[float, int, int]] = field(default_factory=list)

    def add(self, token: int, others: list[tuple[float, int]]) -> None:
        """The next token, and those that came after it with their odds against it."""
        whole = self.reached / (1 + sum(odds for odds, _ in others))
        self.others += [(whole * odds, len(self.chain), other) for odds, other in others if odds > 0]
        self.chain.append(token)
        self.reached = whole

    def tree(self) -> TokenTree:
        """With the most likely of the others."""
        likely = sorted(self.others, reverse=True)[: self.branches]
        return TokenTree(self.chain, [DraftBranch(after, [token]) for _, after, token in likely])


class ModelDrafter:
    """A model with the verifier's tokenizer.

    Args:
        model: the drafter.
        cache: its keys and values.
        device: where steps are laid out and computed.
        vocabulary: of the verifier.
        ends: tokens that end a sequence.
        seed: for requests without one.
        token_budget: the most tokens that it computes at once.

    Attributes:
        longest_branch: one token: those that came second cost nothing more, what would follow them a step each.
    """

    longest_branch: int | None = 1

    def __init__(
        self,
        model: Model,
        cache: DraftCache,
        device: AbstractContextManager[object],
        *,
        vocabulary: int,
        ends: frozenset[int],
        seed: int,
        token_budget: int,
    ) -> None:
        self.model = model
        self._cache = cache
        self._device = device
        self._vocabulary = vocabulary
        self._ends = ends
        self._seed = seed
        self._budget = token_budget

    @property
    def store(self) -> KeysValues:
        """Its keys and values."""
        return self._cache.store

    def unprepared(self, sequence: Sequence) -> int:
        """Those that have no keys and values of this model."""
        return len(sequence.tokens) - 1 - self._cache.known(sequence)

    @torch.inference_mode()
    def propose(self, plan: StepPlan) -> Drafts:
        """Drafts of all sequences, a token of each at a time."""
        self._cache.begin(plan)
        longest = self.model.spec.max_length  # which may be shorter than the verifier's
        growing = {
            chunk.sequence: _Growing(min(chunk.drafts, longest - len(chunk.sequence.tokens)), len(chunk.spare))
            for chunk in plan.chunks
            if chunk.drafts and len(chunk.sequence.tokens) < longest
        }
        begun = time.perf_counter()
        prepared = self._prepare(list(growing))
        preparing = time.perf_counter() - begun
        with ExitStack() as stack:
            for sequence in growing:
                stack.enter_context(trying(sequence))
            left = dict(growing)
            while left:
                for sequence, (token, others) in self._next(left).items():
                    draft = left[sequence]
                    draft.add(token, others)
                    sequence.tokens.append(token)
                    if sequence.matcher is not None:
                        sequence.matcher.accept(token)
                    if self._is_over(sequence, token) or len(draft.chain) == draft.longest:
                        del left[sequence]
        for sequence, draft in growing.items():
            self._cache.drafted(sequence, draft.chain)
        return Drafts({sequence: draft.tree() for sequence, draft in growing.items()}, prepared, preparing)

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """As the cache has it."""
        self._cache.replaced(block, by)

    def _prepare(self, sequences: list[Sequence]) -> int:
        """Compute the keys and values of all tokens before the last one; returns how many had none."""
        count = 0
        for sequence in sequences:
            start, stop = self._cache.known(sequence), len(sequence.tokens) - 1
            count += stop - start
            while start < stop:
                piece = min(self._budget, stop - start)
                self.compute([self._run(sequence, start, start + piece, 0)])
                self._cache.computed(sequence, start, start + piece)
                start += piece
        return count

    def _next(self, drafts: dict[Sequence, _Growing]) -> dict[Sequence, tuple[int, list[tuple[float, int]]]]:
        """The next token of each, chosen as the verifier will choose its own, and those that came next, with their odds against it."""
        sequences = list(drafts)
        logits = self.compute([self._run(s, len(s.tokens) - 1, len(s.tokens), 1) for s in sequences]).cpu()
        missing = self._vocabulary - logits.shape[1]
        if missing:  # tables of embeddings may be padded
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        stats = self.model.logit_statistics(logits)
        found = {}
        for row, sequence in enumerate(sequences):
            draft, params = drafts[sequence], sequence.request.params
            if params.is_plainly_greedy and not draft.branches:
                found[sequence] = stats.best[row], []
                continue
            by_token = logits[row]
            if not params.is_plainly_greedy:
                by_token = merits(by_token, sequence, self._ends, self._seed, len(draft.chain))
            best = by_token.topk(1 + draft.branches)
            first, *others = best.values.tolist()
            # A token's odds against the first: the quotient of their probabilities, or of these over their noise.
            is_logit = params.temperature == 0
            odds = (
                [math.exp(each - first) if is_logit else each / first for each in others]
                if first > 0 or is_logit
                else []
            )
            token, *second = best.indices.tolist()
            found[sequence] = token, list(zip(odds, second, strict=False))
        return found

    def _run(self, sequence: Sequence, start: int, stop: int, wants: int) -> Run:
        return Run(sequence.tokens[start:stop], start, sequence.blocks, sequence.request.grows_to, wants)

    def compute(self, runs: list[Run]) -> Tensor:
        """A step of the drafter; returns the wanted rows of logits."""
        store = self._cache.store
        with self._device:
            return self.model(self.model.batch(runs, store.block_size), store)

    def _is_over(self, sequence: Sequence, token: int) -> bool:
        """Whether nothing after a token would be of use."""
        params, matcher = sequence.request.params, sequence.matcher
        if matcher is not None and (matcher.is_complete or matcher.failure is not None):
            return True
        return token in params.stop_token_ids or (token in self._ends and not params.ignore_eos)
