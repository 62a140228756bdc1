"""Drafts by a model that is cheaper than the one that verifies them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor

from ..decoder.batch import Run
from ..decoder.kv_cache import KeysValues
from ..decoder.model import Model
from ..requests.sequence import Sequence
from ..sampling.sampling import choose, trying
from ..scheduling.plan import StepPlan
from .caches import DraftCache
from .drafter import Drafts


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
    """

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
        wanted = {
            chunk.sequence: min(chunk.drafts, longest - len(chunk.sequence.tokens))
            for chunk in plan.chunks
            if chunk.drafts and len(chunk.sequence.tokens) < longest
        }
        begun = time.perf_counter()
        prepared = self._prepare(list(wanted))
        drafts = Drafts({sequence: [] for sequence in wanted}, prepared, time.perf_counter() - begun)
        with ExitStack() as stack:
            for sequence in wanted:
                stack.enter_context(trying(sequence))
            while wanted:
                for sequence, token in self._next(drafts, list(wanted)).items():
                    draft = drafts.of[sequence]
                    draft.append(token)
                    sequence.tokens.append(token)
                    if sequence.matcher is not None:
                        sequence.matcher.accept(token)
                    if self._is_over(sequence, token) or len(draft) == wanted[sequence]:
                        del wanted[sequence]
        for sequence, draft in drafts.of.items():
            self._cache.drafted(sequence, draft)
        return drafts

    def _prepare(self, sequences: list[Sequence]) -> int:
        """Compute the keys and values of all tokens before the last one; returns how many had none."""
        count = 0
        for sequence in sequences:
            start, stop = self._cache.known(sequence), len(sequence.tokens) - 1
            count += stop - start
            while start < stop:
                piece = min(self._budget, stop - start)
                self._compute([self._run(sequence, start, start + piece, 0)])
                self._cache.computed(sequence, start, start + piece)
                start += piece
        return count

    def _next(self, drafts: Drafts, sequences: list[Sequence]) -> dict[Sequence, int]:
        """The next token of each, chosen as the verifier will choose its own."""
        logits = self._compute([self._run(s, len(s.tokens) - 1, len(s.tokens), 1) for s in sequences]).cpu()
        missing = self._vocabulary - logits.shape[1]
        if missing:  # tables of embeddings may be padded
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        stats = self.model.logit_statistics(logits)
        found = {}
        for row, sequence in enumerate(sequences):
            if sequence.request.params.is_plainly_greedy:
                found[sequence] = stats.best[row]
            else:
                ahead = len(drafts.of[sequence])
                found[sequence] = choose(logits[row], sequence, self._ends, self._seed, ahead)
        return found

    def _run(self, sequence: Sequence, start: int, stop: int, wants: int) -> Run:
        return Run(sequence.tokens[start:stop], start, sequence.blocks, sequence.request.grows_to, wants)

    def _compute(self, runs: list[Run]) -> Tensor:
        store = self._cache.store
        with self._device:
            return self.model(self.model.batch(runs, store.block_size), store)

    def _is_over(self, sequence: Sequence, token: int) -> bool:
        """Whether nothing after a token would be of use."""
        params, matcher = sequence.request.params, sequence.matcher
        if matcher is not None and (matcher.is_complete or matcher.failure is not None):
            return True
        return token in params.stop_token_ids or (token in self._ends and not params.ignore_eos)
