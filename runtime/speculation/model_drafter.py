"""Drafts by a model that is cheaper than the one that verifies them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..decoder.model import Model
from ..decoder.parts.batch import Run
from ..requests.sequence import Sequence
from .caches import DraftCache
from .stepwise import StepwiseDrafter, Verifying


class ModelDrafter(StepwiseDrafter):
    """A model with the verifier's tokenizer.

    Args:
        model: the drafter.
        cache: its keys and values.
        verifying: of the engine whose model verifies.
        divided: lets other ranks compute their share of some tokens, if the drafter is a part of a model that is divided.
    """

    def __init__(
        self,
        model: Model,
        cache: DraftCache,
        verifying: Verifying,
        divided: Callable[[list[Run]], None] | None = None,
    ) -> None:
        # Its length may be shorter than the verifier's.
        super().__init__(cache, model.draw_tokens, verifying, longest=model.spec.max_length)
        self.model = model
        self._divided, self.is_whole = divided, divided is None
        # Other ranks' blocks would have to be copied, too.
        self.longest_branch = None if divided is None else 1

    def unprepared(self, sequence: Sequence) -> int:
        """Those that have no keys and values of this model."""
        return len(sequence.tokens) - 1 - self._cache.known(sequence)

    def compute(self, runs: list[Run]) -> Tensor:
        """A step of the drafter; returns the wanted rows of logits."""
        store = self._cache.store
        if self._divided is not None:
            self._divided(runs)
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

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        return self._cache.known(sequence), len(sequence.tokens) - 1

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
