"""Drafts by a draft head: each token from what the model made of those before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...decoder.parts.batch import Run
from ...requests.sequence import Sequence
from ...scheduling.plan import StepPlan
from ..caches import NO_BRANCHES, OwnCache
from ..drafter import Chains, Drafts
from ..growing import GrowingBranch, GrowingDraft
from ..stepwise import StepwiseDrafter, Verifying
from .draft_head import DraftHead
from .features import Features

# Positions that have features but no keys and values, up to which these are computed with a draft's first token: those of accepted
# tokens, which take no longer than one.
_TOGETHER = 16


class HeadDrafter(StepwiseDrafter):
    """A draft head, which reads at each position what the model made of the token there, and the token after it.

    Of draft tokens it reads what it made of them itself. Its keys and values of those are written again, from the model's, once
    they are verified.

    Args:
        head: the draft head.
        cache: its keys and values.
        features: what the model's steps made of tokens.
        verifying: of the engine whose model verifies.
        longest: the most tokens of a sequence.

    Attributes:
        together: the most positions that a draft's first step computes.
    """

    behind = 1  # each reads the token after it

    def __init__(
        self, head: DraftHead, cache: HeadCache, features: Features, verifying: Verifying, *, longest: int
    ) -> None:
        super().__init__(cache, head.draw_tokens, verifying, longest=longest, tokens=head.tokens)
        self.head, self.features = head, features
        self.together = min(_TOGETHER, self._budget)
        self._states: dict[Sequence, list[Tensor]] = {}  # after each step of a part of a draft

    def unprepared(self, sequence: Sequence) -> int:
        """Positions that have no keys and values, if they are more than a draft computes with its first token."""
        count = len(sequence.tokens) - 1 - self._cache.known(sequence)
        return count if count > self.together else 0

    def compute(self, runs: list[Run]) -> Tensor:
        """A step of the head from the model's features; returns the wanted rows of logits."""
        return self._computed(runs, None)[0]

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Drafts of all sequences, a token of each at a time."""
        for source, target in plan.copies:
            self.features.copy(source, target, self.features.block_size)
        self._states.clear()
        return super().propose(plan, chains)

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """The new block has the features of the last token and what follows; those before it are copied."""
        super().replaced(sequence, block, by)
        size = self.features.block_size
        before = len(sequence.tokens) - 1 - size * sequence.blocks.index(block)
        self.features.copy(block, by, min(max(before, 0), size))

    def _may_draft(self, sequence: Sequence) -> bool:
        return super()._may_draft(sequence) and len(sequence.tokens) > 1

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """All that have features but the last one, where they are many."""
        start, stop = self._cache.known(sequence), len(sequence.tokens) - 2
        return (start, stop) if stop + 1 - start > self.together else (start, start)

    def _begin(self, sequence: Sequence) -> tuple[int, int]:
        stop = len(sequence.tokens) - 1
        start = min(self._cache.known(sequence), stop - 1)
        self._cache.computed(sequence, start, stop)
        return start, stop

    def _logits(self, sequences: list[Sequence]) -> Tensor:
        begun = [each for each in sequences if each in self._states]
        states = torch.stack([self._states[each][-1] for each in begun]) if begun else None
        if begun:  # all drafts begin together, so that none of the others does
            runs = [self._run(each, len(each.tokens) - 2, len(each.tokens) - 1, 1) for each in sequences]
        else:
            runs = [self._run(each, *self._begin(each), 1) for each in sequences]
        logits, states = self._computed(runs, states)
        for sequence, state in zip(sequences, states, strict=True):
            self._states.setdefault(sequence, []).append(state)
        return logits.cpu()

    def _sequence_of(self, part: GrowingDraft | GrowingBranch) -> Sequence:
        begins, sequence = part.sequence is None, super()._sequence_of(part)
        if begins and isinstance(part, GrowingBranch):
            # What its first token was chosen from; the chain may have gone on since.
            self._states[sequence] = [self._states[part.draft.sequence][part.after]]
        return sequence

    def _run(self, sequence: Sequence, start: int, stop: int, wants: int) -> Run:
        """Some positions, with the tokens after them."""
        tokens = sequence.tokens[start + 1 : stop + 1]
        few = len(tokens) <= self.together
        return Run(tokens, start, sequence.blocks, sequence.request.grows_to, wants, decodes=few and start > 0)

    def _computed(self, runs: list[Run], states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and states of the wanted tokens; without states the model's features are read."""
        store = self._cache.store
        with self._device:
            batch = self.head.batch(runs, store.block_size)
            read = self.features.read(batch.slots) if states is None else states
            return self.head(batch, read, store)


class HeadCache(OwnCache):
    """Keys and values of a draft head, which count only where they are made of the model's features.

    The one at a block's end depends on the token after it, which another sequence with the same blocks may not have: that costs
    accepted drafts and nothing else.
    """

    def drafted(self, sequence: Sequence, draft: list[int], branches: Mapping[int, list[int]] = NO_BRANCHES) -> None:
        """Those of draft tokens will be written again."""
        length = len(sequence.tokens)
        self._write(sequence, length - 1, length + len(draft) - 2)
