"""Drafts by a model that is cheaper than the one that verifies them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..decoder.model import Model
from ..decoder.parts.batch import Run
from ..requests.sequence import Sequence
from .caches import DraftCache
from .stepwise import StepwiseDrafter


class ModelDrafter(StepwiseDrafter):
    """A model with the verifier's tokenizer.

    Args:
        model: the drafter.
        cache: its keys and values.
        device: where steps are laid out and computed.
        vocabulary: of the verifier.
        ends: tokens that end a sequence.
        seed: for requests without one.
        max_num_batched_tokens: the most tokens that it computes at once.
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
        max_num_batched_tokens: int,
    ) -> None:
        longest = model.spec.max_length  # which may be shorter than the verifier's
        super().__init__(cache, model.draw_tokens, vocabulary=vocabulary, longest=longest, ends=ends, seed=seed)
        self.model = model
        self._device = device
        self._budget = max_num_batched_tokens

    def unprepared(self, sequence: Sequence) -> int:
        """Those that have no keys and values of this model."""
        return len(sequence.tokens) - 1 - self._cache.known(sequence)

    def compute(self, runs: list[Run]) -> Tensor:
        """A step of the drafter; returns the wanted rows of logits."""
        store = self._cache.store
        with self._device:
            return self.model(self.model.batch(runs, store.block_size), store)

    @property
    def longest_piece(self) -> int:
        """The most tokens of a text that it reads at once."""
        return min(self._budget, self.model.spec.max_length)

    def warm_up(self, count: int) -> None:
        """Read a text of so many tokens in blocks that hold nothing yet, so that the first request waits for no compiler."""
        blocks = [0] * -(-count // self._cache.store.block_size)
        self.compute([Run([0] * count, 0, blocks, count, 0)])

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
        if count and self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()  # or its time would be taken for the drafts'
        return count

    def _may_draft(self, sequence: Sequence) -> bool:
        # Of a model whose table is padded further than the drafter's.
        known = self.model.spec.vocabulary >= self._vocabulary or max(sequence.tokens) < self.model.spec.vocabulary
        return known and super()._may_draft(sequence)

    def _begin(self, sequence: Sequence) -> tuple[int, int]:
        return len(sequence.tokens) - 1, len(sequence.tokens)

    def _logits(self, sequences: list[Sequence]) -> Tensor:
        return self.compute([self._run(s, len(s.tokens) - 1, len(s.tokens), 1) for s in sequences]).cpu()

    def _run(self, sequence: Sequence, start: int, stop: int, wants: int) -> Run:
        return Run(sequence.tokens[start:stop], start, sequence.blocks, sequence.request.grows_to, wants)
